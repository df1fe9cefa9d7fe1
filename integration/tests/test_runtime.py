"""The runtime against transformers' own DynamicCache: equality, isolation, batches, turns."""

from __future__ import annotations

import pytest
import torch
from families import build, generate, prompt
from transformers import DynamicCache

from kv_integration import FullKV, SABlock, SentenceKV, attach

METHODS = [FullKV(), SABlock(budget=1.0), SentenceKV(budget=1.0)]
SMALL = [FullKV(), SABlock(budget=12, window=4), SentenceKV(budget=12, window=4)]
TIGHT = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.bfloat16: {"atol": 6e-2, "rtol": 6e-2}}
ids = {"ids": lambda m: m.name}


@pytest.mark.parametrize("method", METHODS, **ids)
@pytest.mark.parametrize("lengths", [(40,), (40, 23, 1)], ids=str)
def test_lossless_settings_equal_full_kv(model, tokenizer, method, lengths):
    inputs = prompt(*lengths)
    tokens, logits = generate(model, inputs, DynamicCache(config=model.config))
    with attach(model, tokenizer) as kv:
        ours, our_logits = generate(model, inputs, kv.cache(method))
    torch.testing.assert_close(our_logits, logits, **TIGHT[torch.float32])
    assert torch.equal(ours, tokens)


@pytest.mark.parametrize("method", METHODS, **ids)
def test_lossless_settings_equal_full_kv_in_bf16(tokenizer, method):
    model = build("llama", torch.bfloat16)
    inputs = prompt(60)
    _, logits = generate(model, inputs, DynamicCache(config=model.config), new=3)
    with attach(model, tokenizer) as kv:
        _, our_logits = generate(model, inputs, kv.cache(method), new=3)
    assert our_logits.dtype == logits.dtype
    torch.testing.assert_close(our_logits, logits, **TIGHT[torch.bfloat16])


@pytest.mark.parametrize("method", METHODS, **ids)
def test_prompt_logits_are_those_of_the_model_alone(model, tokenizer, method):
    inputs = prompt(40)
    expected = model(**inputs).logits
    with attach(model, tokenizer) as kv:
        logits = model(**inputs, past_key_values=kv.cache(method)).logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("method", SMALL, **ids)
def test_a_padded_row_equals_that_row_alone(model, tokenizer, method):
    lengths = (50, 7, 31)
    batch = prompt(*lengths)
    with attach(model, tokenizer) as kv:
        together, logits = generate(model, batch, kv.cache(method))
        for row, length in enumerate(lengths):
            alone = {name: x[row : row + 1, 50 - length :] for name, x in batch.items()}
            tokens, row_logits = generate(model, alone, kv.cache(method))
            torch.testing.assert_close(logits[:, row], row_logits[:, 0], **TIGHT[torch.float32])
            assert torch.equal(together[row, 50 - length :], tokens[0])


@pytest.mark.parametrize("method", SMALL, **ids)
@pytest.mark.parametrize("lengths", [(50,), (50, 21)], ids=str)
def test_chunked_prefill_equals_one_shot(model, tokenizer, method, lengths):
    inputs = prompt(*lengths)
    with attach(model, tokenizer) as kv:
        tokens, logits = generate(model, inputs, kv.cache(method))
        for size in (16, 49, 7):
            cache = kv.cache(method, prompt_length=50)
            chunked, chunked_logits = generate(model, inputs, cache, prefill_chunk_size=size)
            torch.testing.assert_close(chunked_logits, logits, **TIGHT[torch.float32])
            assert torch.equal(chunked, tokens)


@pytest.mark.parametrize("method", METHODS, **ids)
@pytest.mark.parametrize("lengths", [(30,), (30, 11)], ids=str)
def test_a_later_turn_equals_full_kv_when_lossless(model, tokenizer, method, lengths):
    def converse(cache):
        first, _ = generate(model, prompt(*lengths), cache)
        turn = prompt(9, 4, seed=1) if len(lengths) > 1 else prompt(9, seed=1)
        old = torch.cat([prompt(*lengths)["attention_mask"], torch.ones(len(lengths), 6).long()], 1)
        inputs = {
            "input_ids": torch.cat([first, turn["input_ids"]], 1),
            "attention_mask": torch.cat([old, turn["attention_mask"]], 1),
        }
        return generate(model, inputs, cache)

    tokens, logits = converse(DynamicCache(config=model.config))
    with attach(model, tokenizer) as kv:
        ours, our_logits = converse(kv.cache(method))
    torch.testing.assert_close(our_logits, logits, **TIGHT[torch.float32])
    assert torch.equal(ours, tokens)


@pytest.mark.parametrize("method", SMALL, **ids)
def test_caches_on_one_model_do_not_mix(tokenizer, method):
    model = build("llama")
    prompts = [prompt(40, seed=1), prompt(25, seed=2)]
    with attach(model, tokenizer) as kv:
        alone = [generate(model, inputs, kv.cache(method), new=5)[0] for inputs in prompts]
        caches = [kv.cache(method) for _ in prompts]
        tokens = [inputs["input_ids"] for inputs in prompts]
        for step in range(5):
            for i, cache in enumerate(caches):
                new = tokens[i] if step == 0 else tokens[i][:, -1:]
                logits = model(new, past_key_values=cache).logits
                tokens[i] = torch.cat([tokens[i], logits[:, -1:].argmax(-1)], 1)
    assert all(torch.equal(a, b) for a, b in zip(tokens, alone, strict=True))


@pytest.mark.parametrize("method", SMALL, **ids)
def test_reset_makes_a_cache_new(tokenizer, method):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        first = generate(model, prompt(40), cache)[1]
        generate(model, prompt(33, seed=5), kv.cache(method))
        cache.reset()
        assert cache.get_seq_length() == 0
        again = generate(model, prompt(40), cache)[1]
    assert torch.equal(first, again)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attach_and_detach_leave_no_trace(model, tokenizer, implementation):
    model.set_attn_implementation(implementation)
    inputs = prompt(40, 17)
    before = generate(model, inputs)[1]
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    for _ in range(2):
        with attach(model, tokenizer) as kv:
            assert torch.equal(generate(model, inputs)[1], before)
            generate(model, inputs, kv.cache(SABlock(budget=8)))
            assert torch.equal(generate(model, inputs)[1], before)
    assert model.config._attn_implementation == implementation
    assert hooks == [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(generate(model, inputs)[1], before)


def test_a_forward_that_fails_leaves_the_model_usable(tokenizer):
    model = build("llama")
    inputs = prompt(40)
    before = generate(model, inputs)[1]
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SABlock(budget=8))

        def fail(*_):
            raise RuntimeError("out of something")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of something"):
            model(**inputs, past_key_values=cache)
        hook.remove()
        assert torch.equal(generate(model, inputs)[1], before)
        with pytest.raises(ValueError, match="interrupted"):
            model(**inputs, past_key_values=cache)
        cache.reset()
        fresh = generate(model, inputs, kv.cache(SABlock(budget=8)))[1]
        assert torch.equal(generate(model, inputs, cache)[1], fresh)


@pytest.mark.parametrize("method", METHODS, **ids)
@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str
)
def test_beam_search_equals_full_kv_when_lossless(tokenizer, method, options):
    model = build("llama")
    inputs = prompt(40, 22)
    run = {"max_new_tokens": 6, "do_sample": False, **options}
    expected = model.generate(**inputs, **run)
    with attach(model, tokenizer) as kv:
        ours = model.generate(**inputs, past_key_values=kv.cache(method), **run)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("method", METHODS, **ids)
def test_sampling_with_a_seed_equals_full_kv_when_lossless(tokenizer, method):
    model = build("llama")
    inputs = prompt(40, 22)
    run = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 2}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **run)
    with attach(model, tokenizer) as kv:
        torch.manual_seed(3)
        ours = model.generate(**inputs, past_key_values=kv.cache(method), **run)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("method", [FullKV(), SABlock(budget=12, window=4)], **ids)
def test_crop_takes_back_what_came_after_the_prompt(tokenizer, method):
    model = build("llama")
    inputs = prompt(40, 22)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method)
        model(**inputs, past_key_values=cache)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1).long()], 1)
        one, other = torch.tensor([[5], [6]]), torch.tensor([[9], [3]])
        first = model(one, attention_mask=mask, past_key_values=cache).logits
        cache.crop(-1)
        model(other, attention_mask=mask, past_key_values=cache)
        cache.crop(-1)
        again = model(one, attention_mask=mask, past_key_values=cache).logits
        assert cache.get_seq_length() == 41
        with pytest.raises(ValueError, match="only 1 tokens came after the prompt"):
            cache.crop(-2)
    assert torch.equal(first, again)
