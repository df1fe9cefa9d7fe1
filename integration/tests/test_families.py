"""Every family of models: what generate() gives on our caches and on transformers' own."""

from __future__ import annotations

import pytest
import torch
from cases import FEW, LOSSLESS, RETRIEVES, SMALL, close, converse, each, in_families
from families import BY_LENGTH, FAMILIES, build, full_kv, generate, prompt, shared

from kv_integration import FullKV, SABlock, attach

LOCAL = {"mistral-sliding": "sss", "gemma3": "scc", "cohere2": "scc"}
every_family = pytest.mark.parametrize("family", FAMILIES)
ROW_BY_ROW = [f for f in FAMILIES if f not in BY_LENGTH]


@in_families(LOSSLESS, FEW, families=FAMILIES)
@pytest.mark.parametrize("lengths", [(40,), (40, 23, 1)], ids=str)
def test_lossless_settings_equal_full_kv(family, tokenizer, method, lengths):
    model, inputs = shared(family), prompt(*lengths)
    tokens, logits = generate(model, inputs, full_kv(model), new=4)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        ours, our_logits = generate(model, inputs, cache, new=4)
    close(our_logits, logits)
    assert torch.equal(ours, tokens)
    assert cache.report().tokens_seen == 43  # the model did not go on with a cache of its own


@in_families(LOSSLESS, FEW, families=["llama", "mistral-sliding", "gemma3", "gpt-neox", "gpt2"])
def test_eager_attention_is_carried_on(family, tokenizer, method):
    model, inputs = build(family), prompt(40, 23)
    model.set_attn_implementation("eager")
    _, logits = generate(model, inputs, full_kv(model), new=4)
    with attach(model, tokenizer) as kv:
        close(generate(model, inputs, kv.cache(method), new=4)[1], logits)


@in_families(SMALL, FEW, families=FAMILIES)
def test_prompt_logits_are_those_of_the_model_alone(family, tokenizer, method):
    model, inputs = build(family), prompt(40)
    expected = model(**inputs).logits
    with attach(model, tokenizer) as kv:
        logits = model(**inputs, past_key_values=kv.cache(method)).logits
    assert torch.equal(logits, expected)


@in_families(SMALL, FEW, families=ROW_BY_ROW)
def test_a_padded_row_equals_that_row_alone(family, tokenizer, method):
    model, lengths = shared(family), (50, 7, 31)
    batch = prompt(*lengths)
    with attach(model, tokenizer) as kv:
        _, logits = generate(model, batch, kv.cache(method), new=4)
        for row, length in enumerate(lengths):
            alone = {name: x[row : row + 1, 50 - length :] for name, x in batch.items()}
            close(logits[:, row], generate(model, alone, kv.cache(method), new=4)[1][:, 0])


@in_families(SMALL, FEW, families=ROW_BY_ROW)
def test_chunked_prefill_equals_one_shot(family, tokenizer, method):
    model, inputs = shared(family), prompt(50, 21)
    with attach(model, tokenizer) as kv:
        _, logits = generate(model, inputs, kv.cache(method), new=3)
        for size in (16, 49):
            cache = kv.cache(method)
            close(generate(model, inputs, cache, new=3, prefill_chunk_size=size)[1], logits)
            assert cache.report().prompt_tokens == 50


@in_families(LOSSLESS, FEW, families=BY_LENGTH)
def test_chunked_prefill_where_rope_depends_on_the_length(family, tokenizer, method):
    model, inputs = shared(family), prompt(28)
    options = {"new": 3, "prefill_chunk_size": 12}
    _, logits = generate(model, inputs, full_kv(model), **options)
    with attach(model, tokenizer) as kv:
        close(generate(model, inputs, kv.cache(method), **options)[1], logits)


@in_families(LOSSLESS, FEW, families=FAMILIES)
def test_later_turns_equal_full_kv_when_lossless(family, tokenizer, method):
    model, turns = shared(family), [(36, 33), (9, 4), (3, 6)]
    expected = converse(model, full_kv(model), turns, new=3)
    with attach(model, tokenizer) as kv:
        ours = converse(model, kv.cache(method), turns, new=3)
    for logits, reference in zip(ours, expected, strict=True):
        close(logits, reference)


@in_families(SMALL, RETRIEVES, families=ROW_BY_ROW)
def test_methods_that_retrieve_hold_rows_apart(family, tokenizer, method):
    model, lengths = shared(family), (50, 31)
    batch = prompt(*lengths)
    with attach(model, tokenizer) as kv:
        _, logits = generate(model, batch, kv.cache(method), new=3)
        for row, length in enumerate(lengths):
            alone = {name: x[row : row + 1, 50 - length :] for name, x in batch.items()}
            close(logits[:, row], generate(model, alone, kv.cache(method), new=3)[1][:, 0])


@in_families(LOSSLESS, RETRIEVES, families=FAMILIES)
def test_methods_that_retrieve_equal_full_kv_when_lossless(family, tokenizer, method):
    """InfiniGen runs every family's attention modules a second time, ahead of their turn."""
    model, turns = shared(family), [(36, 33), (6, 4)]
    expected = converse(model, full_kv(model), turns, new=3)
    with attach(model, tokenizer) as kv:
        ours = converse(model, kv.cache(method), turns, new=3)
    for logits, reference in zip(ours, expected, strict=True):
        close(logits, reference)


@every_family
def test_attach_and_detach_leave_no_trace(family, tokenizer):
    model, inputs = build(family), prompt(40, 17)
    before = generate(model, inputs, new=3)[1]
    names = set(model.__dict__)
    for _ in range(3):
        with attach(model, tokenizer) as kv:
            assert torch.equal(generate(model, inputs, new=3)[1], before)
            generate(model, inputs, kv.cache(SABlock(budget=8)), new=3)
            assert torch.equal(generate(model, inputs, new=3)[1], before)
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert set(model.__dict__) == names
    assert torch.equal(generate(model, inputs, new=3)[1], before)


@every_family
def test_layers_with_a_window_keep_it_and_the_others_are_compressed(family, tokenizer):
    model = shared(family)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SABlock(budget=12, window=4))
        generate(model, prompt(40), cache, new=2)
        layers = cache.report().layers
    kinds = "".join(layer.kind[0] for layer in layers)
    assert kinds == LOCAL.get(family, "ccc")
    assert all(layer.entries_attended == 12 for layer in layers if layer.kind == "compressed")
    heads = model.config.get_text_config()
    if "s" in kinds:
        window = 2 * 8 * heads.num_key_value_heads * 16 * 4
        assert all(layer.device_bytes == window for layer in layers if layer.kind == "sliding")


@each(LOSSLESS, FEW)
def test_phi3_starts_over_where_its_rope_changes(tokenizer, method):
    """From 32 tokens on all keys are rotated anew: all tokens come again, as a new prompt."""
    model, inputs = shared("phi3-longrope"), prompt(29)
    _, logits = generate(model, inputs, full_kv(model), new=8)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        close(generate(model, inputs, cache, new=8)[1], logits)
        report = cache.report()
    assert (report.prompt_tokens, report.tokens_seen) == (33, 36)


def test_two_families_side_by_side(tokenizer):
    """One name is registered for both attention functions; each model keeps its own."""
    models = [shared("llama"), shared("gpt-neox")]
    inputs = prompt(40)
    expected = [generate(model, inputs, full_kv(model))[1] for model in models]
    with attach(models[0], tokenizer) as one, attach(models[1], tokenizer) as other:
        caches = [one.cache(FullKV()), other.cache(FullKV())]
        ours = [generate(m, inputs, c)[1] for m, c in zip(models, caches, strict=True)]
    for logits, reference in zip(ours, expected, strict=True):
        close(logits, reference)
