"""ShadowKV and ShadowKV+: against plain loops, over long answers, in bytes; what they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import slow_shadowkv as slow
import torch
from families import generate
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kv_integration import ShadowKV, ShadowKVPlus, attach, haystack
from kv_integration.embedded import model_path
from kv_integration.method import Plan, Row
from kv_integration.rope import RopeTables, Rotation, Turn, spread

NEAR = 1e-4  # scores nearer than this to each other may be taken in either order


class Layer:
    """Random queries, keys and values of one layer, their RoPE, and both ways to hold them."""

    def __init__(self, seed, *, tokens, heads=2, groups=2, dim=6, turned=4, layout="half"):
        self.draw = torch.Generator().manual_seed(seed)
        self.heads, self.groups, self.dim, self.layout = heads, groups, dim, layout
        self.speed = torch.rand(turned // 2, generator=self.draw)
        self.pairs = slow.pairs_of(turned, layout)
        self.scale, self.seen = 0.7, tokens
        # neighbours are alike, as in text
        self.keys, self.values = self.states(tokens), self.states(tokens)
        self.rope = RopeTables(
            Turn(0, *self.tables(0, 1), Rotation(layout, layout)), torch.device("cpu"), grows=True
        )
        if turned:
            self.rope.append(*self.tables(0, tokens), None, batch=1)

    def states(self, count):
        x = torch.randn(self.heads, count, self.dim, generator=self.draw)
        return x + 0.8 * x.roll(1, 1) + 0.5

    def tables(self, start, count):
        angles = torch.arange(start, start + count)[:, None] * self.speed
        return tuple(spread(x, self.layout)[None] for x in (angles.cos(), angles.sin()))

    def angle(self, token):
        return [(np.cos(x), np.sin(x)) for x in (np.float32(token) * self.speed.numpy())]

    def row(self):
        empty = torch.empty(1, self.heads * self.groups, 0, self.dim)
        rope = self.rope if len(self.speed) else None
        return Row(0, empty, self.keys[None], self.values[None], self.scale, rope=rope)

    def compressed(self, method):
        return method.compress([self.row()], Plan())

    def reference(self, method):
        return slow.Shadow(
            self.keys,
            self.values,
            self.angle,
            self.pairs,
            self.row().granted(method.budget),
            chunk=method.chunk,
            window=method.window,
            outliers=method.outliers,
            rank=method.rank,
            scale=self.scale,
        )

    def new(self, count):
        """Queries, keys and values of `count` more tokens; RoPE hears of them."""
        if len(self.speed):
            self.rope.append(*self.tables(self.seen, count), None, batch=1)
        self.seen += count
        shape = (self.heads * self.groups, count, self.dim)
        return torch.randn(shape, generator=self.draw), self.states(count), self.states(count)


def watched(state):
    """The state, and the chunks it selects as lists per head."""
    picks, select = [], state._select

    def remembering(*args):
        chunks = select(*args)
        picks.append([[n for n in head if n >= 0] for head in chunks[0].tolist()])
        return chunks

    state._select = remembering
    return state, picks


def stepped(state, queries, keys, values, scale):
    return state.step(queries[None], keys[None], values[None], valid=None, scale=scale)[0]


layers = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "tokens": st.integers(1, 60),
        "heads": st.integers(1, 3),
        "groups": st.integers(1, 3),
        "turned": st.sampled_from([0, 2, 4, 6]),
        "layout": st.sampled_from(["half", "interleaved"]),
    }
)
settings_ = st.fixed_dictionaries(
    {
        "budget": st.one_of(st.integers(1, 70), st.floats(0.05, 1.0)),
        "chunk": st.integers(1, 9),
        "outliers": st.integers(0, 4),
        "window": st.integers(1, 12),
        "rank": st.integers(1, 6),
    }
)


@given(layers, settings_, st.lists(st.integers(1, 3), min_size=1, max_size=3))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_decoding_is_the_papers(layer, options, steps):
    layer, method = Layer(**layer), ShadowKV(**options)
    state, picks = watched(layer.compressed(method))
    reference = layer.reference(method)
    assert state.entries().unique().item() <= layer.row().granted(method.budget)
    for count in steps:
        new = layer.new(count)
        expected, chosen, margin = reference.step(*new)
        assume(margin > NEAR)
        ours = stepped(state, *new, layer.scale)
        assert not picks or picks[-1] == chosen
        np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=1e-4)


@given(layers, settings_, st.integers(1, 12), st.integers(1, 30))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_is_generated_is_projected_as_the_paper_says(layer, options, recent, steps):
    layer, method = Layer(**layer), ShadowKVPlus(**options, recent=recent)
    state, picks = watched(layer.compressed(method))
    reference = layer.reference(method)
    for _ in range(steps):
        new = layer.new(1)
        if state.moves[0]:
            reference.move(recent)
        expected, chosen, margin = reference.step(*new)
        assume(margin > NEAR)
        ours = stepped(state, *new, layer.scale)
        assert not picks or picks[-1] == chosen
        np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=1e-4)
    assert state.held[0] == len(reference.exact)


@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.fixed_dictionaries(
        {"chunk": st.integers(1, 20), "outliers": st.integers(0, 60), "window": st.integers(1, 40)}
    ),
)
def test_parts_of_a_prompt_keep_to_the_budget(tokens, budget, options):
    budget = min(budget, tokens)
    share = ShadowKV(**options).share(budget, tokens)
    chunk = options["chunk"]
    assert share.tail + share.chunks * chunk == tokens
    assert share.exact + (share.outliers + share.selected) * chunk <= budget
    assert share.outliers + share.selected <= share.chunks
    assert share[1:] == (*share[1:3], *slow.shares(budget, tokens, **options)[2:])
    if budget == tokens:
        assert share.exact == share.tail and share.outliers + share.selected == share.chunks


def test_the_default_is_the_papers_at_128k():
    method = ShadowKV()
    assert method.share(2464, 131072)[1:] == (32, 16380, 48, 256)
    assert ShadowKV(budget=1.0, sparse=1 / 64).share(131072, 131072)[3:] == (48, 256)
    assert (method.rank_of(1024), method.rank_of(128)) == (160, 128)


@pytest.fixture(scope="module")
def embedded():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(model_path())


@pytest.mark.parametrize(
    "method",
    [
        ShadowKV(budget=96, rank=24, outliers=4, window=16),
        ShadowKVPlus(budget=0.2, rank=48, outliers=3, window=16, recent=12),
    ],
    ids=lambda m: m.name,
)
def test_decoding_is_the_papers_on_a_real_prompt(embedded, method, monkeypatch):
    """Every layer of the embedded model, one of them without RoPE, over a text with a needle."""
    model, tokenizer = embedded
    text = haystack.needle_prompt(
        tokenizer, context=400, depth=0.4, seed="real", keys=haystack.read_keys(model_path())
    )
    seen, compress = [], type(method).compress

    def remembering(self, rows, plan):
        (row,) = rows
        state, picks = watched(compress(self, rows, plan))
        seen.append((replace(row, keys=row.keys.clone(), values=row.values.clone()), picks, []))
        steps, step = seen[-1][2], state.step

        def stepping(queries, keys, values, **options):
            out = step(queries, keys, values, **options)
            steps.append((queries[0], keys[0], values[0], out[0]))
            return out

        state.step = stepping
        return state

    monkeypatch.setattr(type(method), "compress", remembering)
    with attach(model, tokenizer) as kv:
        inputs = {"input_ids": torch.tensor([text.ids])}
        generate(model, inputs, kv.cache(method), new=12)
        turned = [kv.context.rotations[i] is not None for i in range(4)]
    assert turned == [True, True, False, True] and len(seen) == 4
    table = model.model.rotary_emb(torch.ones(1), torch.arange(420)[None])
    for (row, picks, steps), turns in zip(seen, turned, strict=True):
        cos, sin = (x[0, :, :32].double().numpy() for x in table)
        if not turns:
            cos, sin = np.ones_like(cos), np.zeros_like(sin)
        reference = slow.Shadow(
            row.keys[0],
            row.values[0],
            lambda t, cos=cos, sin=sin: zip(cos[t], sin[t], strict=True),
            slow.pairs_of(64, "half"),
            row.granted(method.budget),
            chunk=method.chunk,
            window=method.window,
            outliers=method.outliers,
            rank=method.rank,
            scale=row.scale,
        )
        for (queries, keys, values, ours), chunks in zip(steps, picks, strict=True):
            if isinstance(method, ShadowKVPlus):
                reference.move(method.recent)
            expected, chosen, margin = reference.step(queries, keys, values)
            assert margin > NEAR and chunks == chosen
            np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=1e-3)


def exact(layer, queries):
    """Attention of one token over all tokens so far, in float64."""
    grouped = queries.double().view(layer.heads, layer.groups, layer.dim)
    scores = (grouped @ layer.all_keys.double().mT * layer.scale).softmax(-1)
    return (scores @ layer.all_values.double()).view(-1, 1, layer.dim)


@pytest.mark.parametrize(
    "method",
    [ShadowKV(budget=1.0, chunk=4), ShadowKVPlus(budget=1.0, chunk=4, window=8, recent=40)],
    ids=lambda m: m.name,
)
def test_two_thousand_generated_tokens_are_all_attended(method):
    layer = Layer(0, tokens=50)
    state = layer.compressed(method)
    layer.all_keys, layer.all_values = layer.keys, layer.values
    for number in range(2000):
        queries, keys, values = layer.new(1)
        layer.all_keys = torch.cat([layer.all_keys, keys], 1)
        layer.all_values = torch.cat([layer.all_values, values], 1)
        ours = stepped(state, queries, keys, values, layer.scale)
        if number % 97 == 0 or number == 1999:
            torch.testing.assert_close(ours.double(), exact(layer, queries), atol=1e-4, rtol=1e-4)
    assert state.exact.count == (2050 - state.chunks * 4) + 4 * state.shares[0].outliers


def test_bytes_per_generated_token():
    """On the device a row of the left factor and a share of a landmark; the values are off it."""
    layer = Layer(0, tokens=200, heads=4, dim=16, turned=16)
    method = ShadowKVPlus(budget=64, rank=8, window=16, recent=64)
    state, plain = layer.compressed(method), layer.compressed(ShadowKV(budget=64, rank=8))

    def run(steps):
        for _ in range(steps):
            new = layer.new(1)
            for each in (state, plain):
                stepped(each, *new, layer.scale)
        return [each.nbytes() for each in (state, plain)]

    before, plain_before = run(100)
    after, plain_after = run(1600)
    full = 2 * 4 * 16 * 4
    each = (after["device"] - before["device"]) / 1600
    # 8 coordinates, an eighth of 4 landmarks of 16 channels, and flags; a buffer has room to grow,
    # and the selection that is resident on the device keeps its share of the chunks
    assert 8 * 4 + 4 * 16 * 4 / 8 <= each <= 0.45 * full
    assert (after["host"] - before["host"]) / 1600 >= 0.9 * full / 2
    assert (plain_after["device"] - plain_before["device"]) / 1600 >= 0.95 * full
    assert plain_after["host"] == plain_before["host"]
