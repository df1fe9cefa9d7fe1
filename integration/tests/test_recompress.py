"""Compressing again: nothing lost when lossless, memory bounded over many turns."""

from __future__ import annotations

import pytest
import torch
from cases import LOSSLESS, RECOMPRESSES, SMALL, close, converse, each
from families import VOCAB, build, full_kv, generate, prompt, shared

from kv_integration import METHODS, SABlock, SnapKV, attach
from kv_integration.method import Context, Row

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("family", ["llama", "llama-mqa", "gemma3", "gpt2"])
@each(LOSSLESS, RECOMPRESSES)
def test_lossless_settings_equal_full_kv_over_turns(family, tokenizer, method):
    model, turns = shared(family), [(30, 11), (9, 4), (2, 6)]
    expected = converse(model, full_kv(model), turns)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method, recompress_after=3)
        ours = converse(model, cache, turns)
        assert all(layer.since <= 4 for layer in cache.compressed)
    for logits, reference in zip(ours, expected, strict=True):
        close(logits, reference)


@each(LOSSLESS, RECOMPRESSES)
def test_beams_and_drafts_go_on_with_it(tokenizer, method):
    model, inputs = shared("llama"), prompt(40, 22)
    beams = {"num_beams": 3, **GREEDY}
    with attach(model, tokenizer) as kv:
        expected = model.generate(**inputs, **beams)
        cache = kv.cache(method, recompress_after=2)
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **beams), expected)
        expected = model.generate(**prompt(40), **GREEDY)
        for draft in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": build("llama", seed=1)}):
            cache = kv.cache(method, recompress_after=2)
            ours = model.generate(**prompt(40), past_key_values=cache, **GREEDY, **draft)
            assert torch.equal(ours, expected)


@each(SMALL, RECOMPRESSES)
def test_memory_stays_bounded_over_twenty_turns(tokenizer, method):
    model, ids, held = shared("llama"), prompt(40)["input_ids"], []
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method, recompress_after=12)
        for turn in range(20):
            tokens, _ = generate(model, {"input_ids": ids}, cache, new=4)
            ids = torch.cat([tokens, prompt(6, seed=turn)["input_ids"]], 1)
            held.append(sum(layer.device_bytes for layer in cache.report().layers))
            assert all(layer.since <= 12 + 10 for layer in cache.compressed)
        report = cache.report()
        plan = cache.plan.nbytes
    assert report.tokens_seen == 40 + 19 * 10 + 3
    assert max(held[10:]) <= 1.1 * max(held[:10])
    # 16 entries at most, 22 tokens since, the room of a buffer, and the latest queries
    entries = 16 * (2 if method.name == "pyramidkv" else 1) + 22
    entry, query = 2 * (2 * 16 * 4 + 8 + 4), 4 * 16 * 4 + 1
    assert max(held) <= 3 * ((entries + 64) * entry + 22 * query)
    assert plan <= 24 * report.tokens_seen  # ids and offsets are all that grows
    assert report.entries_attended <= entries


@each(SMALL, RECOMPRESSES)
def test_entries_are_as_many_as_granted_after_each_time(tokenizer, method):
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method, recompress_after=1)
        model(**prompt(40), past_key_values=cache)
        before = [layer.state.entries() for layer in cache.compressed]
        for step in range(9):
            model(torch.tensor([[5 + step]]), past_key_values=cache)
        after = [layer.state.entries() for layer in cache.compressed]
    assert all(x.max() <= (16 if method.name != "pyramidkv" else 24) for x in before + after)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in RECOMPRESSES])
def test_the_others_are_refused_by_name(tokenizer, name):
    text = f"recompress_after is 9, but {name} cannot compress again"
    with attach(shared("llama"), tokenizer) as kv, pytest.raises(ValueError, match=text):
        kv.cache(SMALL[name], recompress_after=9)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(tokenizer, limit):
    text = f"recompress_after must be at least 1, got {limit}"
    with attach(shared("llama"), tokenizer) as kv, pytest.raises(ValueError, match=text):
        kv.cache(SABlock(), recompress_after=limit)


def test_what_was_compressed_again_cannot_be_cropped(tokenizer):
    model, token = shared("llama"), torch.tensor([[5]])
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(SnapKV(budget=12, window=4), recompress_after=2)
        model(**prompt(40), past_key_values=cache)
        for _ in range(4):
            model(token, past_key_values=cache)
        expected = model(token, past_key_values=cache).logits
        cache.crop(-1)
        assert torch.equal(model(token, past_key_values=cache).logits, expected)
        with pytest.raises(ValueError, match="only 2 tokens came after the last compression"):
            cache.crop(-3)
        assert cache.get_seq_length() == 45


@each(SMALL, RECOMPRESSES)
def test_a_row_without_anything_new_stays_as_it_is(tokenizer, method):
    model, ids = shared("llama"), prompt(30, 30)["input_ids"]
    ones = torch.ones(2, 30, dtype=torch.long)
    turn = torch.tensor([[1, 1, 1, 1, 1], [7, 8, 9, 10, 11]])
    mask = torch.cat([ones, torch.tensor([[0] * 5, [1] * 5])], 1)

    def after(cache, rows, said):
        model(ids[rows], past_key_values=cache)
        if said:
            model(turn[rows], attention_mask=mask[rows], past_key_values=cache)
        place = torch.tensor([[30], [35]])[rows]
        token = torch.tensor([[20], [21]])[rows]
        seen = torch.cat([mask[rows] if said else ones[rows], ones[rows, :1]], 1)
        return model(token, attention_mask=seen, position_ids=place, past_key_values=cache).logits

    with attach(model, tokenizer) as kv, torch.no_grad():
        together = after(kv.cache(method, recompress_after=3), slice(0, 2), True)
        quiet = after(kv.cache(method, recompress_after=3), slice(0, 1), False)
        talks = after(kv.cache(method, recompress_after=3), slice(1, 2), True)
    close(together[:1], quiet)
    close(together[1:], talks)


@each(SMALL, RECOMPRESSES)
def test_entries_know_where_they_came_from(tokenizer, method):
    """Keys that spell their position, and after each round positions that agree with them."""
    generator = torch.Generator().manual_seed(0)
    context, heads, dim = Context(tokenizer), 2, 4

    def ids(count):
        return torch.randint(2, VOCAB, (count,), generator=generator)

    def tokens(start, count):
        keys = 0.1 * torch.randn(1, heads, count, dim, generator=generator)
        keys[..., 0] = torch.arange(start, start + count)
        queries = torch.randn(1, 2 * heads, count, dim, generator=generator)
        queries[..., 0] = 0.0
        return queries, keys, keys.clone()

    first = ids(40)
    plan = method.begin([first], context)
    plan.settle(recompress=True)
    queries, keys, values = tokens(0, 40)
    state = method.compress(
        [Row(0, queries[:, :, -min(max(method.observe, 1), 40) :], keys, values, 1.0)], plan
    )
    seen = 40
    for count in (7, 1, 12):
        plan.advance(ids(count)[None], None)
        queries, keys, values = tokens(seen, count)
        state.step(queries, keys, values, valid=None, scale=1.0)
        seen += count
        held = state.recall(0, seen)
        positions = held.positions.expand(1, heads, -1)
        for head in range(heads):
            here = positions[0, head] >= 0
            place = positions[0, head][here]
            assert place.diff().min() > 0 and place[-count:].tolist() == list(
                range(seen - count, seen)
            )
            spelled = held.keys[0, head, here, 0]
            if method.name in ("semanticache", "d2o"):  # means with later, or with any, entries
                assert len(place) < seen
            else:
                assert torch.equal(spelled, place.float())
            if held.log_size is not None:
                total = held.log_size[0, head][here].exp().sum()
                torch.testing.assert_close(total, torch.tensor(float(seen)))
        row = Row(
            0, queries, held.keys, held.values, 1.0,
            seen=seen, positions=held.positions, log_size=held.log_size,
        )  # fmt: skip
        state = method.compress([row], plan)
