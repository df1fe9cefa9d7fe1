"""Batches of unequal prompts: each row is what it would be alone, whatever the others are."""

from __future__ import annotations

import pytest
import torch
from cases import LOSSLESS, RECOMPRESSES, SMALL, close, converse, each
from families import generate, prompt, shared

from kv_integration import FullKV, InfiniGen, Loki, Quest, SemantiCache, SentenceKV, attach

LENGTHS = (50, 7, 31, 1)


def alone(batch, row):
    """The inputs of one row without its padding."""
    start = int(batch["attention_mask"][row].argmax())
    return {name: x[row : row + 1, start:] for name, x in batch.items()}


@each(SMALL)
def test_a_padded_row_equals_that_row_alone(tokenizer, method):
    model, batch = shared("llama"), prompt(*LENGTHS)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        together, logits = generate(model, batch, cache, new=8)
        attended = cache.report().entries_attended
        for row, length in enumerate(LENGTHS):
            cache = kv.cache(method)
            tokens, row_logits = generate(model, alone(batch, row), cache, new=8)
            close(logits[:, row], row_logits[:, 0])
            assert torch.equal(together[row, 50 - length :], tokens[0])
            assert cache.report().entries_attended <= attended


@pytest.mark.parametrize(
    "method",
    [
        SentenceKV(budget=0.3, window=4, keep=3.0, retrieve="sentence", pooling="none"),
        SemantiCache(theta=0.3),
        SemantiCache(budget=10, chunks="fixed", chunk_size=5, proportional=False),
        SemantiCache(budget=0.3, chunks="none"),
        Quest(budget=0.3, page=4, offload=True),
        Loki(budget=0.3, share=0.5, offload=True),
        InfiniGen(budget=0.3, share=1.0, alpha=1.0, offload=False),
    ],
    ids=str,
)
def test_so_it_is_with_other_options(tokenizer, method):
    model, batch = shared("llama"), prompt(*LENGTHS)
    with attach(model, tokenizer) as kv:
        logits = generate(model, batch, kv.cache(method))[1]
        for row in range(len(LENGTHS)):
            row_logits = generate(model, alone(batch, row), kv.cache(method))[1]
            close(logits[:, row], row_logits[:, 0])


@each(SMALL)
def test_the_order_of_rows_does_not_matter(tokenizer, method):
    model, batch = shared("llama"), prompt(*LENGTHS)
    order = [2, 0, 3, 1]
    with attach(model, tokenizer) as kv:
        logits = generate(model, batch, kv.cache(method))[1]
        turned = {name: x[order] for name, x in batch.items()}
        close(generate(model, turned, kv.cache(method))[1], logits[:, order])


@each(SMALL, but=RECOMPRESSES)
def test_a_method_that_cannot_compress_again_is_refused_by_name(tokenizer, method):
    with attach(shared("llama"), tokenizer) as kv, pytest.raises(ValueError, match=method.name):
        kv.cache(method, recompress_after=5)


@pytest.mark.parametrize(
    ("method", "recompress_after"),
    [
        pytest.param(method, after, id=f"{name}-{after}")
        for name, method in SMALL.items()
        for after in ((None, 5) if name in RECOMPRESSES else (None,))
    ],
)
def test_so_it_is_in_later_turns(tokenizer, method, recompress_after):
    model, turns = shared("llama"), [(30, 41), (9, 4), (2, 6)]
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method, recompress_after=recompress_after)
        together = converse(model, cache, turns)
        for row in range(2):
            cache = kv.cache(method, recompress_after=recompress_after)
            own = converse(model, cache, [{row: turn[row]} for turn in turns])
            for logits, expected in zip(together, own, strict=True):
                close(logits[:, row], expected[:, 0])


@each(LOSSLESS)
def test_rows_can_be_dropped_and_go_on(tokenizer, method):
    model, batch = shared("llama"), prompt(40, 22, 31)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method)
        model(**batch, past_key_values=cache)
        mask = torch.cat([batch["attention_mask"], torch.ones(3, 1, dtype=torch.long)], 1)
        tokens = torch.tensor([[5], [6], [7]])
        whole = kv.cache(method)
        model(**batch, past_key_values=whole)
        expected = model(tokens, attention_mask=mask, past_key_values=whole).logits
        cache.batch_select_indices(torch.tensor([2, 0]))
        assert cache.report().batch == 2
        kept = model(tokens[[2, 0]], attention_mask=mask[[2, 0]], past_key_values=cache).logits
    close(kept, expected[[2, 0]])


@pytest.mark.parametrize("change", ["batch_select_indices", "batch_repeat_interleave"])
def test_rows_of_half_a_prompt_stay_as_they_are(tokenizer, change):
    model, batch = shared("gemma3"), prompt(40, 40)
    halves = batch["input_ids"].split(20, dim=1)
    argument = torch.tensor([1]) if change == "batch_select_indices" else 2
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(FullKV(), prompt_length=40)
        model(halves[0], past_key_values=cache)
        with pytest.raises(ValueError, match="before the prompt is complete"):
            getattr(cache, change)(argument)
        logits = model(halves[1], past_key_values=cache).logits[:, -1]
        whole = model(**batch, past_key_values=kv.cache(FullKV())).logits[:, -1]
    close(logits, whole)
