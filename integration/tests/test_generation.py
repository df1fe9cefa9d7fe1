"""What a user of transformers does with a model, on our caches, for every method."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import BY_INPUT, CANNOT_CROP, FORGETS_ON, LOSSLESS, SMALL, close, converse, each
from families import build, full_kv, generate, prompt, shared
from transformers import pipeline
from transformers.generation.streamers import BaseStreamer

from kv_integration import TOVA, FullKV, SABlock, StreamingLLM, attach

LOSSLESS_BY_INPUT = {name: LOSSLESS[name] for name in BY_INPUT}
FORGETS_LATER = {"streamingllm": StreamingLLM(budget=100), "tova": TOVA(budget=100)}
GREEDY = {"max_new_tokens": 6, "do_sample": False}
SAMPLING = {"max_new_tokens": 6, "do_sample": True}
BEAMS = {"num_beams": 3, **GREEDY}


@each(LOSSLESS)
@pytest.mark.parametrize("lengths", [(40,), (40, 22, 1)], ids=str)
def test_lossless_settings_equal_full_kv(tokenizer, method, lengths):
    model, inputs = shared("llama"), prompt(*lengths)
    tokens, logits = generate(model, inputs, full_kv(model))
    with attach(model, tokenizer) as kv:
        ours, our_logits = generate(model, inputs, kv.cache(method))
    close(our_logits, logits)
    assert torch.equal(ours, tokens)


@each(LOSSLESS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_the_error_is_that_of_the_dtype(tokenizer, method, dtype):
    """Measured against float32 with the same weights, tokens forced to be the same."""
    model, inputs, steps = shared("llama", dtype), prompt(60, 31), prompt(5, 5)["input_ids"]

    def logits(model, cache):
        with torch.no_grad():
            parts = [model(**inputs, past_key_values=cache, logits_to_keep=1).logits]
            mask = inputs["attention_mask"]
            for token in steps.T[:, :, None]:
                mask = torch.cat([mask, torch.ones_like(token)], 1)
                parts.append(model(token, attention_mask=mask, past_key_values=cache).logits)
        assert parts[-1].dtype == model.dtype
        return torch.cat(parts, 1).float()

    exact = build("llama")
    exact.load_state_dict(model.state_dict())
    reference = logits(exact, full_kv(exact))
    rounding = (logits(model, full_kv(model)) - reference).abs()
    with attach(model, tokenizer) as kv:
        ours = (logits(model, kv.cache(method)) - reference).abs()
    assert ours.max() <= 1.5 * rounding.max()
    assert ours.mean() <= 1.2 * rounding.mean()


@each(LOSSLESS)
def test_sampling_with_a_seed(tokenizer, method):
    model, inputs = shared("llama"), prompt(40, 22)
    torch.manual_seed(3)
    expected = model.generate(**inputs, **SAMPLING)
    with attach(model, tokenizer) as kv:
        torch.manual_seed(3)
        ours = model.generate(**inputs, past_key_values=kv.cache(method), **SAMPLING)
    assert torch.equal(ours, expected)


@each(LOSSLESS)
def test_several_return_sequences(tokenizer, method):
    model, inputs = shared("llama"), prompt(40, 22)
    run = {**SAMPLING, "num_return_sequences": 3}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **run)
    with attach(model, tokenizer) as kv:
        torch.manual_seed(3)
        cache = kv.cache(method)
        ours = model.generate(**inputs, past_key_values=cache, **run)
    assert torch.equal(ours, expected)
    assert len(ours) == cache.report().batch == 6


@each(LOSSLESS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("returned", [1, 2])
def test_beam_search(family, tokenizer, method, returned):
    model, inputs = shared(family), prompt(40, 22)
    run = {**BEAMS, "num_return_sequences": returned}
    expected = model.generate(**inputs, **run)
    with attach(model, tokenizer) as kv:
        ours = model.generate(**inputs, past_key_values=kv.cache(method), **run)
    assert torch.equal(ours, expected)


@each(SMALL)
def test_beams_that_compress_equal_rows_that_were_given_thrice(tokenizer, method):
    """Reordered beams hold what a cache holds that saw each beam's own tokens from the start."""
    model, inputs = shared("llama"), prompt(40, 22)

    def step(tokens):  # a page's bounds depend on the angle of RoPE: a row counts its own tokens
        place = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        return model(tokens, attention_mask=mask, position_ids=place, past_key_values=cache).logits

    with attach(model, tokenizer) as kv, torch.no_grad():
        cache, steps = kv.cache(method), torch.randint(2, 96, (3, 6))
        mask = inputs["attention_mask"]
        step(inputs["input_ids"])
        cache.batch_repeat_interleave(3)
        mask = mask.repeat_interleave(3, 0)
        origin = torch.arange(6)
        orders = ([1, 1, 0, 5, 3, 5], [2, 0, 1, 3, 4, 4])
        history = torch.empty(6, 0, dtype=torch.long)
        for order, tokens in zip(orders, steps, strict=False):
            mask = torch.cat([mask, torch.ones(6, 1, dtype=torch.long)], 1)
            step(tokens[:, None])
            cache.reorder_cache(torch.tensor(order))
            history = torch.cat([history, tokens[:, None]], 1)[order]
            origin = origin[order]
        mask = torch.cat([mask, torch.ones(6, 1, dtype=torch.long)], 1)
        ours = step(steps[2][:, None])
        for row in range(6):
            alone, start = kv.cache(method), inputs["attention_mask"][row // 3].argmax()
            model(inputs["input_ids"][row // 3, None, start:], past_key_values=alone)
            for token in (*history[row], steps[2][row]):
                logits = model(token.view(1, 1), past_key_values=alone).logits
            close(ours[row], logits[0])


@each(SMALL | FORGETS_LATER | LOSSLESS_BY_INPUT, but=CANNOT_CROP)
@pytest.mark.parametrize("draft", ["lookup", "same", "other"])
def test_assisted_decoding_gives_the_tokens_of_greedy_decoding(tokenizer, method, draft):
    model, inputs = shared("llama"), prompt(40)
    assistants = {"same": model, "other": build("llama", seed=1)}
    options = {"prompt_lookup_num_tokens": 3}
    if draft != "lookup":
        options = {"assistant_model": assistants[draft]}
    run = {"max_new_tokens": 10, "do_sample": False}
    with attach(model, tokenizer) as kv:
        expected = model.generate(**inputs, past_key_values=kv.cache(method), **run)
        cache = kv.cache(method)
        ours = model.generate(**inputs, past_key_values=cache, **run, **options)
    assert torch.equal(ours, expected)
    assert cache.report().prompt_tokens == 40


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3", "gpt2"])
@each(SMALL, ["full", "sablock"])
def test_assisted_decoding_in_other_families(family, tokenizer, method):
    model, inputs = shared(family), prompt(40)
    run = {"max_new_tokens": 10, "do_sample": False}
    with attach(model, tokenizer) as kv:
        expected = model.generate(**inputs, past_key_values=kv.cache(method), **run)
        ours = model.generate(
            **inputs, past_key_values=kv.cache(method), assistant_model=shared("llama"), **run
        )
    assert torch.equal(ours, expected)


@each(SMALL, FORGETS_ON)
def test_what_cannot_take_tokens_back_says_so(tokenizer, method):
    model, inputs = shared("llama"), prompt(40)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        with pytest.raises(ValueError, match=r"cannot (crop|take back|be taken back)"):
            model.generate(
                **inputs, past_key_values=cache, assistant_model=build("llama", seed=1), **GREEDY
            )
        cache.reset()
        generate(model, inputs, cache)


@each(SMALL)
@pytest.mark.parametrize("lengths", [(50,), (50, 21)], ids=str)
def test_chunked_prefill_equals_one_shot(tokenizer, method, lengths):
    model, inputs = shared("llama"), prompt(*lengths)
    with attach(model, tokenizer) as kv:
        tokens, logits = generate(model, inputs, kv.cache(method))
        for size in (16, 49, 7):
            cache = kv.cache(method)
            chunked, chunked_logits = generate(model, inputs, cache, prefill_chunk_size=size)
            close(chunked_logits, logits)
            assert torch.equal(chunked, tokens)


@each(SMALL)
@pytest.mark.parametrize("cuts", [(10, 25, 33), (33,), (20, 33), (20, 21, 33)], ids=str)
def test_tokens_beyond_the_prompt_length_come_after_the_prompt(tokenizer, method, cuts):
    model, tokens = shared("llama"), prompt(33)["input_ids"]

    def logits(cache, cuts):
        starts = (0, *cuts[:-1])
        parts = [tokens[:, start:end] for start, end in zip(starts, cuts, strict=True)]
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    with attach(model, tokenizer) as kv, torch.no_grad():
        expected = logits(kv.cache(method), (20, *(end for end in cuts if end > 20)))
        close(logits(kv.cache(method, prompt_length=20), cuts), expected)


class Heard(BaseStreamer):
    """A streamer that remembers what it was given."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@each(SMALL)
def test_a_streamer_hears_every_token(tokenizer, method):
    model, inputs, streamer = shared("llama"), prompt(40), Heard()
    with attach(model, tokenizer) as kv:
        expected = model.generate(**inputs, past_key_values=kv.cache(method), **GREEDY)
        model.generate(**inputs, past_key_values=kv.cache(method), streamer=streamer, **GREEDY)
    assert streamer.tokens == expected[0].tolist() and streamer.ended


@each(SMALL)
def test_a_pipeline(tokenizer, method):
    model = shared("llama")
    text = tokenizer.decode(prompt(40)["input_ids"][0])
    with attach(model, tokenizer) as kv:
        talk = pipeline("text-generation", model=model, tokenizer=tokenizer)
        said = talk(text, past_key_values=kv.cache(method), return_full_text=False, **GREEDY)
        expected = model.generate(
            **tokenizer(text, return_tensors="pt", return_token_type_ids=False),
            past_key_values=kv.cache(method),
            **GREEDY,
        )
    assert said[0]["generated_text"].split() == tokenizer.decode(expected[0, 40:]).split()


@each(SMALL)
def test_a_loop_of_forward_passes_equals_generate(tokenizer, method):
    model, inputs = shared("llama"), prompt(40, 22)
    with attach(model, tokenizer) as kv, torch.no_grad():
        tokens, logits = generate(model, inputs, kv.cache(method))
        cache, new, mask = kv.cache(method), inputs["input_ids"], inputs["attention_mask"]
        for step in range(6):
            place = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            out = model(new, attention_mask=mask, position_ids=place, past_key_values=cache)
            close(out.logits[:, -1], logits[step])
            new = out.logits[:, -1:].argmax(-1)
            assert torch.equal(new, tokens[:, 40 + step, None])
            mask = torch.cat([mask, torch.ones_like(new)], 1)


@each(LOSSLESS)
@pytest.mark.parametrize("turns", [[(30,), (9,), (5,)], [(30, 11), (9, 4), (2, 6)]], ids=str)
def test_a_second_and_a_third_turn_equal_full_kv_when_lossless(tokenizer, method, turns):
    model = shared("llama")
    expected = converse(model, full_kv(model), turns)
    with attach(model, tokenizer) as kv:
        ours = converse(model, kv.cache(method), turns)
    for logits, reference in zip(ours, expected, strict=True):
        close(logits, reference)


def interleaved(model, caches, prompts, steps=5):
    """Greedy tokens of several conversations that take their steps in turn."""
    tokens = [inputs["input_ids"] for inputs in prompts]
    for step in range(steps):
        for i, cache in enumerate(caches):
            new = tokens[i] if step == 0 else tokens[i][:, -1:]
            owner = model[i] if isinstance(model, list) else model
            with torch.no_grad():
                logits = owner(new, past_key_values=cache).logits
            tokens[i] = torch.cat([tokens[i], logits[:, -1:].argmax(-1)], 1)
    return tokens


@each(SMALL)
def test_caches_on_one_model_do_not_mix(tokenizer, method):
    model = shared("llama")
    prompts = [prompt(40, seed=1), prompt(25, seed=2), prompt(40, seed=1)]
    with attach(model, tokenizer) as kv:
        alone = [generate(model, inputs, kv.cache(method), new=5)[0] for inputs in prompts]
        others = [kv.cache(method), kv.cache(method), full_kv(model)]
        tokens = interleaved(model, others, prompts)
    expected = [*alone[:2], generate(model, prompts[2], new=5)[0]]
    assert all(torch.equal(a, b) for a, b in zip(tokens, expected, strict=True))


@each(SMALL)
def test_two_models_at_once(tokenizer, method):
    models = [build("llama"), build("llama", seed=1)]
    models[1].set_attn_implementation("eager")
    prompts = [prompt(40, seed=1), prompt(25, seed=2)]
    alone = []
    for model, inputs in zip(models, prompts, strict=True):
        with attach(model, tokenizer) as kv:
            alone.append(generate(model, inputs, kv.cache(method), new=5)[0])
    with attach(models[0], tokenizer) as one, attach(models[1], tokenizer) as other:
        tokens = interleaved(models, [one.cache(method), other.cache(method)], prompts)
    assert all(torch.equal(a, b) for a, b in zip(tokens, alone, strict=True))


@each(SMALL)
def test_threads_on_one_model_do_not_mix(tokenizer, method):
    model, prompts = shared("llama"), [prompt(30 + 5 * i, seed=i) for i in range(4)]
    with attach(model, tokenizer) as kv:
        alone = [generate(model, inputs, kv.cache(method))[0] for inputs in prompts]
        with ThreadPoolExecutor(4) as pool:
            caches = [kv.cache(method) if i else None for i in range(4)]
            tokens = list(pool.map(lambda i: generate(model, prompts[i], caches[i])[0], range(4)))
    alone[0] = generate(model, prompts[0])[0]
    assert all(torch.equal(a, b) for a, b in zip(tokens, alone, strict=True))


@pytest.mark.parametrize("options", [GREEDY, SAMPLING, BEAMS], ids=["greedy", "sampling", "beams"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_attached_model_without_our_cache_is_untouched(tokenizer, implementation, options):
    model, inputs = build("llama"), prompt(40, 22)
    model.set_attn_implementation(implementation)

    def run():
        torch.manual_seed(0)
        return model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)

    before = run()
    with attach(model, tokenizer) as kv:
        generate(model, inputs, kv.cache(SABlock(budget=8)))
        between = run()
        forward = model(**inputs).logits
    assert torch.equal(model(**inputs).logits, forward)
    assert model.config._attn_implementation == implementation
    for after in (between, run()):
        assert torch.equal(after.sequences, before.sequences)
        assert torch.equal(torch.stack(after.logits), torch.stack(before.logits))


@each(SMALL)
def test_a_reset_cache_is_as_new(tokenizer, method):
    model = shared("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        first = generate(model, prompt(40), cache)[1]
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.report().device_bytes == 0
        generate(model, prompt(33, 20, seed=5), cache)
        cache.reset()
        assert torch.equal(generate(model, prompt(40), cache)[1], first)


@each(SMALL)
@pytest.mark.parametrize("when", ["prompt", "chunk", "step"])
def test_a_forward_that_fails_leaves_the_model_usable(tokenizer, method, when):
    model, inputs = build("llama"), prompt(40)
    before = generate(model, inputs)[1]
    with attach(model, tokenizer) as kv:
        fresh = generate(model, inputs, kv.cache(method))[1]
        cache = kv.cache(method, prompt_length=60 if when == "chunk" else None)
        token = inputs if when == "prompt" else {"input_ids": torch.tensor([[5]])}
        if when != "prompt":
            model(**inputs, past_key_values=cache)

        def fail(*_):
            raise RuntimeError("out of something")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of something"):
            model(**token, past_key_values=cache)
        hook.remove()
        assert torch.equal(generate(model, inputs)[1], before)
        with pytest.raises(ValueError, match="interrupted"):
            model(**token, past_key_values=cache)
        assert torch.equal(generate(model, inputs, kv.cache(method))[1], fresh)
        cache.reset()
        cache.prompt_length = None
        assert torch.equal(generate(model, inputs, cache)[1], fresh)
    assert torch.equal(generate(model, inputs)[1], before)


def test_a_generate_that_fails_expects_nothing_any_more(tokenizer):
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(SABlock(budget=12, window=4))
        with pytest.raises(ValueError, match="do_sampel"):
            model.generate(**prompt(40), past_key_values=cache, do_sampel=True)
        model(**prompt(30), past_key_values=cache)
        assert cache.prompt_complete


@each(SMALL, but=CANNOT_CROP + FORGETS_ON)
def test_crop_takes_back_what_came_after_the_prompt(tokenizer, method):
    model, inputs = shared("llama"), prompt(40, 22)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method)
        model(**inputs, past_key_values=cache)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1).long()], 1)
        one, other = torch.tensor([[5], [6]]), torch.tensor([[9], [3]])
        first = model(one, attention_mask=mask, past_key_values=cache).logits
        cache.crop(0)
        cache.crop(-1)
        model(other, attention_mask=mask, past_key_values=cache)
        cache.crop(-1)
        again = model(one, attention_mask=mask, past_key_values=cache).logits
        assert cache.get_seq_length() == cache.report().tokens_seen == 41
        with pytest.raises(ValueError, match="only 1 tokens came after the prompt"):
            cache.crop(-2)
        with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative, got 3"):
            cache.crop(3)
    assert torch.equal(first, again)


def test_streaming_takes_back_until_it_rolls(tokenizer):
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(StreamingLLM(budget=44))
        model(**prompt(40), past_key_values=cache)
        token = torch.tensor([[5]])
        first = model(token, past_key_values=cache).logits
        model(torch.tensor([[7]]), past_key_values=cache)
        cache.crop(-2)
        assert torch.equal(model(token, past_key_values=cache).logits, first)
        for _ in range(4):
            model(token, past_key_values=cache)
        with pytest.raises(ValueError, match="cannot be taken back: what they displaced"):
            cache.crop(-1)


def test_a_cache_outlives_its_block(tokenizer):
    model, turns = shared("llama"), [(30,), (9,)]
    with attach(model, tokenizer) as kv:
        expected = converse(model, kv.cache(FullKV()), turns)
        cache = kv.cache(FullKV())
        first = converse(model, cache, turns[:1])
    with attach(model, tokenizer):
        inputs = {"input_ids": torch.cat([first_ids(first), prompt(9, seed=100)["input_ids"]], 1)}
        close(generate(model, inputs, cache, new=4)[1], expected[1])


def first_ids(logits):
    return torch.cat([prompt(30, seed=0)["input_ids"], logits[0].argmax(-1).T], 1)
