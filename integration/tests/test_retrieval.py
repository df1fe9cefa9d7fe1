"""Quest, Loki and InfiniGen against plain loops: what they choose, attend, hold and move."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import recorded
import slow
import torch
from cases import close
from families import build, generate, shared
from families import prompt as words
from slow_retrieval import SlowLow, SlowQuest, principal, query_directions
from test_baselines import SHAPES, compress_without_positions
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kv_integration import InfiniGen, Loki, Quest, attach, loki_bases
from kv_integration.method import Context, Plan, Row

SEEDS = pytest.mark.parametrize("seed", range(2))
OFFLOAD = pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
BUDGETS = pytest.mark.parametrize("budget", [1, 7, 12, 0.5, 49, 50])


def granted(budget, tokens):
    return math.floor(budget * tokens) if isinstance(budget, float) else min(budget, tokens)


def tokens_of(seed, prompt, count):
    """Queries [n, H_q, D], keys and values [n, H, D or Dv] of `count` new tokens."""
    draw = torch.Generator().manual_seed(1000 + seed)
    heads, _, dim = prompt.keys.shape
    shapes = (len(prompt.queries), dim), (heads, dim), (heads, prompt.values.shape[-1])
    return [torch.randn(count, *shape, generator=draw) for shape in shapes]


def batched(x):
    """[n, H, D] -> [1, H, n, D]."""
    return x.transpose(0, 1)[None]


def check_decoding(state, loop, prompt, seed):
    """Steps and turns give what the loops give, and steps choose the same tokens."""
    new = tokens_of(seed, prompt, 9)
    at = 0
    for count in (1, 1, 3, 1, 2, 1):
        given = [x[at : at + count] for x in new]
        exact = [np.float64(x) for x in given]
        at += count
        if count == 1:
            found = state.index.choose(batched(given[0]), prompt.scale)[0]
            chosen, out = loop.step(*(x[0] for x in exact))
            assert [[t for t in row if t >= 0] for row in found.tolist()] == chosen
            out = out[None]
        else:
            out = loop.turn(*exact)
        ours = state.step(*(batched(x) for x in given), valid=None, scale=prompt.scale)
        np.testing.assert_allclose(ours[0].transpose(0, 1), out, atol=2e-5)


@SEEDS
@SHAPES
@OFFLOAD
@pytest.mark.parametrize(("budget", "page"), [(12, 5), (3, 5), (0.5, 1), (33, 16), (49, 16)])
def test_quest_reads_the_pages_with_the_highest_bounds(seed, heads, groups, offload, budget, page):
    prompt = slow.Prompt(seed, heads=heads, groups=groups)
    state = compress_without_positions(Quest(budget=budget, page=page, offload=offload), prompt)
    check_decoding(state, SlowQuest(prompt, granted(budget, 50), page), prompt, seed)


@OFFLOAD
def test_quest_leaves_the_first_layers_whole(offload):
    prompt = slow.Prompt(3)
    method = Quest(budget=12, page=5, offload=offload, whole_layers=2)
    for layer, whole in enumerate((True, True, False)):
        state = compress_without_positions(method, prompt, layer=layer, layers=3)
        assert state.entries().unique().tolist() == [prompt.tokens if whole else 12]
        assert state.nbytes()["host"] == 0 or not whole
        loop = SlowQuest(prompt, prompt.tokens if whole else 12, 5)
        new = tokens_of(2, prompt, 1)
        _, out = loop.step(*(np.float64(x[0]) for x in new))
        ours = state.step(*(batched(x) for x in new), valid=None, scale=prompt.scale)
        np.testing.assert_allclose(ours[0, :, 0], out, atol=2e-5)


@pytest.mark.parametrize(
    ("size", "share", "wanted"),
    [(128, None, 32), (256, None, 64), (64, None, 32), (20, None, 20), (64, 0.25, 16), (6, 0.3, 2)],
)
def test_loki_takes_a_quarter_of_the_dimensions_or_32(size, share, wanted):
    keys = torch.randn(1, 2, 300, size, generator=torch.Generator().manual_seed(size))
    state = Loki(budget=12, share=share).compress([Row(0, keys, keys, keys, 1.0)], Plan())
    assert state.index.keys.shape == (1, 2, 300, wanted)


@SEEDS
@SHAPES
@OFFLOAD
@BUDGETS
def test_loki_reads_the_tokens_that_score_highest_in_few_dimensions(
    seed, heads, groups, offload, budget
):
    prompt = slow.Prompt(seed, heads=heads, groups=groups)
    state = compress_without_positions(Loki(budget=budget, share=0.5, offload=offload), prompt)
    loop = SlowLow(prompt, granted(budget, 50), principal(prompt, 2))
    check_decoding(state, loop, prompt, seed)


@SEEDS
@SHAPES
@OFFLOAD
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_infinigen_speculates_in_the_directions_of_the_queries(seed, heads, groups, offload, alpha):
    prompt = slow.Prompt(seed, heads=heads, groups=groups)
    method = InfiniGen(budget=12, share=0.75, observe=20, alpha=alpha, offload=offload)
    state = compress_without_positions(method, prompt)
    bases = query_directions(prompt, 3, 20)
    loop = SlowLow(prompt, 12, bases, math.inf if alpha is None else alpha)
    check_decoding(state, loop, prompt, seed)


METHODS = {
    "quest": lambda **more: Quest(budget=12, page=5, **more),
    "loki": lambda **more: Loki(budget=12, **more),
    "infinigen": lambda **more: InfiniGen(budget=12, **more),
}
EACH = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


@EACH
def test_a_guess_decides_what_is_attended(make):
    """What the layer before expects is chosen, whatever the query then is; once, and not again."""
    prompt = slow.Prompt(0)
    state = compress_without_positions(make(offload=True), prompt)
    loop = SlowQuest(prompt, 12, 5)
    (guess, _, _), new = tokens_of(1, prompt, 1), tokens_of(2, prompt, 1)
    chosen = state.index.choose(batched(guess), prompt.scale)[0].tolist()
    state.expect(batched(guess), scale=prompt.scale)
    assert state.prompt.hits.prefetched == 12 * 2
    loop.feed(*(np.float64(x[0]) for x in new[1:]))
    out = state.step(*(batched(x) for x in new), valid=None, scale=prompt.scale)
    expected = loop.attend(np.float64(new[0][0]), chosen)
    np.testing.assert_allclose(out[0, :, 0], expected, atol=2e-5)
    assert state.prompt.hits.misses == 0
    assert state.expected is None


def test_infinigen_looks_with_the_next_layers_projections(tokenizer):
    """The query that layer l's input makes of layer l + 1's weights, for every layer but the first.

    It is all that layer l + 1 chooses by, and what it chooses is there when it comes.
    """
    model, inputs = build("llama"), words(60)
    layers = model.model.layers
    inner, expected = [], []

    def note(module, args, kwargs):
        inner.append(kwargs["hidden_states"])

    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(InfiniGen(budget=12))
        model(**inputs, past_key_values=cache)
        for layer in cache.compressed:
            state = layer.state
            assert state.looks_ahead == (layer.number > 0)
            state.expect = lambda queries, *, scale, state=state, told=state.expect: (
                expected.append((state, queries)), told(queries, scale=scale)
            )  # fmt: skip
        hooks = [x.self_attn.register_forward_pre_hook(note, with_kwargs=True) for x in layers]
        model(torch.tensor([[5]]), past_key_values=cache)
        for hook in hooks:
            hook.remove()
        cos, sin = model.model.rotary_emb(inner[0], torch.tensor([[60]]))
        assert len(expected) == len(layers) - 1
        for (state, found), (number, after) in zip(expected, pairwise(range(3)), strict=True):
            assert state is cache.compressed[after].state
            wanted = layers[after].self_attn.q_proj(inner[number]).view(1, 1, 4, 16)
            wanted, _ = apply_rotary_pos_emb(wanted.transpose(1, 2), wanted[:, :0], cos, sin)
            torch.testing.assert_close(found, wanted)
        first, *later = (layer.state.prompt.hits for layer in cache.compressed)
        assert (first.prefetched, first.misses) == (0, 12 * 2)
        assert all((hits.prefetched, hits.misses) == (12 * 2, 0) for hits in later)


def test_layers_after_one_with_a_window_choose_by_their_own_query(tokenizer):
    """gemma3's layers with a window rotate by other angles, so that their input tells nothing."""
    model = shared("gemma3")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(InfiniGen(budget=12))
        generate(model, words(40), cache, new=2)
        held = [layer.state.prompt.hits.prefetched for layer in cache.compressed]
    assert held == [0, 24]


@EACH
def test_only_what_changed_moves(make):
    prompt = slow.Prompt(3)
    state = compress_without_positions(make(offload=True), prompt)
    entry = (4 + 5) * 4
    before, moved = set(), 0
    new = tokens_of(3, prompt, 6)
    for token in (0, 1, 1, 2, 3, 3, 4, 5):
        given = [batched(x[token : token + 1]) for x in new]
        chosen = state.index.choose(given[0], prompt.scale)[0].tolist()
        wanted = {(head, t) for head, row in enumerate(chosen) for t in row}
        state.step(*given, valid=None, scale=prompt.scale)
        moved += len(wanted - before)
        before = wanted
        assert state.traffic()["bytes_moved"] == moved * entry
    assert state.traffic()["hits"] + state.traffic()["misses"] == 8 * 2 * 12
    turn = [batched(x[:3]) for x in new]
    state.step(*turn, valid=None, scale=prompt.scale)
    assert state.traffic()["bytes_moved"] == (moved + 2 * 50) * entry  # a turn reads all of it


@EACH
@OFFLOAD
def test_a_row_with_one_token_beside_longer_turns_takes_a_step(make, offload):
    prompts = [slow.Prompt(0), slow.Prompt(1)]
    method, counts = make(offload=offload), (3, 1)

    def state_of(*chosen):
        rows = []
        for index, prompt in enumerate(chosen):
            last = prompt.queries[None, :, -max(method.observe, 1) :]
            rows.append(Row(index, last, prompt.keys[None], prompt.values[None], 0.4))
        return method.compress(rows, method.begin([], Context(None)))

    new = [tokens_of(seed, prompt, 3) for seed, prompt in enumerate(prompts)]
    both = [torch.cat([batched(one), batched(other)]) for one, other in zip(*new, strict=True)]
    valid = torch.tensor([[True, True, True], [False, False, True]])
    out = state_of(*prompts).step(*both, valid=valid, scale=0.4)
    for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        own = [batched(x[3 - count :]) for x in new[row]]
        alone = state_of(prompt).step(*own, valid=None, scale=0.4)
        torch.testing.assert_close(out[row, :, 3 - count :], alone[0], atol=2e-5, rtol=1e-5)


@EACH
def test_the_tier_changes_where_bytes_lie_and_nothing_else(tokenizer, make):
    model, inputs, reports = shared("llama"), words(90, 40), []
    with attach(model, tokenizer) as kv:
        outs = []
        for offload in (False, True):
            cache = kv.cache(make(offload=offload))
            outs.append(generate(model, inputs, cache)[1])
            reports.append(cache.report())
    close(*outs)
    device, host = reports
    prompt = (90 + 40) * 3 * 2 * 2 * 16 * 4
    assert (device.host_bytes, host.host_bytes) == (0, prompt)
    assert device.device_bytes - host.device_bytes >= 0.5 * prompt
    assert device.bytes_moved == 0 < host.bytes_moved
    assert device.entries_attended == host.entries_attended == 12


def test_loki_takes_bases_from_another_prompt(tokenizer):
    model, other, inputs = shared("llama"), words(80, seed=5), words(60)
    with attach(model, tokenizer) as kv, torch.no_grad():
        filled = kv.cache(Loki(budget=12, share=0.5))
        model(**other, past_key_values=filled)
        bases = loki_bases(filled)
        assert [basis.shape for basis in bases] == [(2, 16, 8)] * 3
        cache = kv.cache(Loki(budget=12, bases=bases))
        model(**inputs, past_key_values=cache)
        for layer, basis in zip(cache.compressed, bases, strict=True):
            assert torch.equal(layer.state.index.bases[0], basis)
        # The prompt's own bases, given, change nothing.
        same = kv.cache(Loki(budget=12, bases=bases))
        tokens, logits = generate(model, other, same)
        again = generate(model, other, kv.cache(Loki(budget=12, share=0.5)))
        close(logits, again[1])
        assert torch.equal(tokens, again[0])
        with pytest.raises(ValueError, match="one row of a prompt by Loki"):
            loki_bases(kv.cache(Loki()))
        with pytest.raises(ValueError, match="bases holds 2 layers, wanted 3"):
            model(**inputs, past_key_values=kv.cache(Loki(bases=bases[:2])))
        wrong = tuple(basis[:1] for basis in bases)
        with pytest.raises(ValueError, match=r"bases\[0\] has shape \(1, 16, 8\), wanted \[2, 16"):
            model(**inputs, past_key_values=kv.cache(Loki(bases=wrong)))


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("name", ["quest", "loki"])
def test_a_real_prompt_by_loops(name, offload):
    """The embedded model: the same pages and tokens in every layer and step, the same outputs."""
    method = (
        Quest(budget=0.1, offload=offload) if name == "quest" else Loki(budget=0.1, offload=offload)
    )
    cache, _, layers = recorded.run(method, context=400, steps=3)
    for number, (prompt, steps) in enumerate(layers):
        budget = math.floor(0.1 * prompt.tokens)
        loop = (
            SlowQuest(prompt, budget, 16)
            if name == "quest"
            else SlowLow(prompt, budget, principal(prompt, 32))
        )
        for queries, keys, values, out in steps:
            chosen, expected = loop.step(queries, keys, values)
            index = cache.compressed[number].state.index
            ours = index.choose(torch.tensor(queries)[None, :, None].float(), prompt.scale)
            assert ours[0].tolist() == chosen
            np.testing.assert_allclose(out, expected, atol=2e-5)
