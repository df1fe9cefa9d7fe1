"""One prefill for several methods gives what each method gives alone."""

from __future__ import annotations

import pytest
import torch
from small_model import make_model, make_tokenizer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from kv_bench.answers import answers, left_padded
from kv_bench.shared import Shared
from kv_integration import (
    FullKV,
    Method,
    SABlock,
    SentenceKV,
    ShadowKV,
    ShadowKVPlus,
    attach,
    haystack,
)

TOKENIZER = make_tokenizer()
METHODS = [
    FullKV(),
    SABlock(budget=24, window=8),
    SentenceKV(budget=24, window=8),
    SABlock(budget=0.5, window=16),
    ShadowKV(budget=24, window=8, chunk=4, rank=12),
    ShadowKVPlus(budget=24, window=8, chunk=2, rank=8, recent=3),
]


def sliding_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            eos_token_id=0,
            pad_token_id=0,
        )
    ).eval()


def alone(model: PreTrainedModel, prompt: list[int], method: Method, count: int) -> str:
    """Stock generate with nothing of the benchmark around it."""
    ids = torch.tensor([prompt])
    with attach(model, TOKENIZER) as kv:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=kv.cache(method),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=0,
            pad_token_id=0,
        )
    return TOKENIZER.decode(output[0, len(prompt) :], skip_special_tokens=True).strip()


@pytest.mark.parametrize("make", [lambda: make_model(len(TOKENIZER)), sliding_model])
@pytest.mark.parametrize("count", [1, 8])
def test_equal_to_each_method_alone(make, count: int) -> None:
    model = make()
    prompts = [
        haystack.needle_prompt(TOKENIZER, context=context, depth=0.4, seed=context).ids
        for context in (150, 211, 90)
    ]
    expected = [[alone(model, prompt, method, count) for prompt in prompts] for method in METHODS]
    assert count == 1 or len({text for texts in expected for text in texts}) > len(prompts)
    assert answers(model, TOKENIZER, prompts, METHODS, max_new_tokens=count) == expected


def test_one_prompt_alone_equals_that_prompt_in_a_batch() -> None:
    model = make_model(len(TOKENIZER))
    prompts = [
        haystack.needle_prompt(TOKENIZER, context=120 + 7 * n, depth=0.5, seed=n).ids
        for n in range(4)
    ]
    together = answers(model, TOKENIZER, prompts, METHODS, max_new_tokens=6)
    for row, prompt in enumerate(prompts):
        one = answers(model, TOKENIZER, [prompt], METHODS, max_new_tokens=6)
        assert [texts[0] for texts in one] == [texts[row] for texts in together]


def test_answers_end_where_the_model_ends() -> None:
    model = make_model(len(TOKENIZER))
    prompt = haystack.needle_prompt(TOKENIZER, context=100, depth=0.5).ids
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0].tolist()
    new = tokens[len(prompt) :]
    for end in dict.fromkeys(new):
        model.generation_config.eos_token_id = end
        text = TOKENIZER.decode(new[: new.index(end)], skip_special_tokens=True).strip()
        assert answers(model, TOKENIZER, [prompt], METHODS[:1], max_new_tokens=6) == [[text]]


def test_left_padded() -> None:
    ids, mask = left_padded([[1, 2, 3], [4]], 9, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_shared_wants_methods_and_answers_once_each() -> None:
    with pytest.raises(ValueError, match="at least one method"):
        Shared([])
    model = make_model(len(TOKENIZER))
    shared = Shared([FullKV()])
    with attach(model, TOKENIZER) as kv:
        cache = kv.cache(shared)
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
        model(torch.tensor([[8]]), past_key_values=cache)
        cache.crop(-1)
        with pytest.raises(ValueError, match="method 0 has answered already"):
            model(torch.tensor([[8]]), past_key_values=cache)
