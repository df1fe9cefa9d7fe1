"""SeKV equals a slow transcription of the paper; what it cuts, holds, moves and refuses."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import slow_sekv as slow
import torch
from cases import close
from families import build, generate, prompt, shared
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GraniteConfig,
    GraniteForCausalLM,
)

from kv_integration import KVCache, SeKV, attach, haystack
from kv_integration.budget import BudgetTooSmallError
from kv_integration.embedded import model_path
from kv_integration.method import Context, Row
from kv_integration.methods.sekv import SpanPlan
from kv_integration.router import Router
from kv_integration.span_memory import SpanMemory
from kv_integration.span_store import SpanStore
from kv_integration.spans import Spans
from kv_lowrank import pack_spans, span_svd
from kv_offload import FingerprintError

SMALL = {"min_length": 3, "max_length": 7, "max_rank": 3, "window": 5, "sinks": 1, "routing_dim": 3}


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def surprisal_of(seed, tokens):
    """Skewed, as of text; nothing predicts the first token."""
    h = drawn(seed, tokens).exp()
    h[0] = 0.0
    return h


def random_router(seed, *, layers=1, heads=4, kv_heads=2, dim=6):
    router = Router(layers, heads, kv_heads, dim, routing_dim=3, max_rank=4)
    with torch.no_grad():
        for number, parameter in enumerate(router.parameters()):
            parameter.copy_(drawn(seed + number, *parameter.shape))
    return router


class Layer:
    """A random row of one layer, compressed by `method`."""

    def __init__(self, method, seed, tokens, *, heads=4, kv_heads=2, dim=6):
        self.surprisal = surprisal_of(seed, tokens)
        self.plan = method.begin([torch.zeros(tokens, dtype=torch.long)], Context(None))
        self.plan.finish([self.surprisal])
        self.row = Row(
            0,
            drawn(seed + 1, 1, heads, min(method.observe or 1, tokens), dim),
            drawn(seed + 2, 1, kv_heads, tokens, dim) + 0.5,
            drawn(seed + 3, 1, kv_heads, tokens, dim + 1),
            0.4,
        )
        self.state = method.compress([self.row], self.plan)


class Reference:
    """`slow_sekv` over one row of one layer."""

    def __init__(self, method, row, surprisal, granted):
        self.method, self.row, self.scale = method, row, row.scale
        h = [float(x) for x in surprisal]
        keys, values = np.float64(row.keys[0]), np.float64(row.values[0])
        tokens, (first, stop) = len(h), (0, len(h))
        if tokens <= granted:
            self.exact, self.spans = list(range(tokens)), []
        else:
            first, stop = slow.shares(tokens, granted, method.window, method.sinks)
            marks = slow.boundaries(h, method.alpha)
            lengths = {
                name: getattr(method, name) for name in ("min_length", "max_length", "trail")
            }
            self.exact, self.spans = slow.segment(
                marks, first, stop, anchors=method.anchors, **lengths
            )
            self.exact = [*range(first), *self.exact, *range(stop, tokens)]
        self.room = max(granted - len(self.exact) - len(self.spans), 0)
        weights = h if method.weights == "surprisal" else [1.0] * tokens
        weights = [max(w, 1e-6) for w in weights]
        self.group = row.queries.shape[1] // len(keys)
        members = [t for span in self.spans for t in span]
        self.projections, self.heads = [], []
        for head in range(len(keys)):
            if method.router is None:
                own = [slow.leading(keys[head][members], method.routing_dim)] * self.group
            else:
                of_layer = np.float64(method.router.projections.detach()[row.layer])
                own = list(of_layer[head * self.group : (head + 1) * self.group])
            self.projections.append(own)
            self.heads.append(
                slow.Head(
                    keys[head], values[head], self.exact, self.spans, weights, own,
                    self.gates, method.max_rank,
                )
            )  # fmt: skip
        self.thresholds = [self.threshold(query) for query in range(row.queries.shape[1])]
        self.generated = [[] for _ in keys]

    def gates(self, kind, span, sigma, summaries):
        if self.method.router is None:
            return np.ones_like(sigma)
        return slow.rank_gates(self.method.router, self.row.layer, kind, sigma, summaries)

    def threshold(self, query):
        method, head, member = self.method, query // self.group, query % self.group
        if method.threshold is not None:
            return method.threshold
        if method.router is not None:
            return float(method.router.thresholds.detach()[self.row.layer, query])
        if not self.spans:
            return 0.5
        scores = [
            self.heads[head].relevance(np.float64(q), self.projections[head][member], member, s)
            for q in self.row.queries[0, query]
            for s in range(len(self.spans))
        ]
        return slow.quantile_threshold(scores, method.quantile)

    def step(self, queries, keys, values):
        """Several new tokens, one after the other: outputs [1, H_q, Q, D], spans per token."""
        outputs, chosen, margin = [], [], math.inf
        for j in range(queries.shape[2]):
            rows = []
            for head, memory in enumerate(self.heads):
                self.generated[head].append(
                    (np.float64(keys[0, head, j]), np.float64(values[0, head, j]))
                )
                group = np.float64(queries[0, head * self.group : (head + 1) * self.group, j])
                limits = self.thresholds[head * self.group : (head + 1) * self.group]
                out, spans, close_call = slow.step(
                    memory, group, self.projections[head], limits, self.generated[head],
                    self.room, self.scale,
                )  # fmt: skip
                rows.append(out)
                chosen.append(set(spans))
                margin = min(margin, close_call)
            outputs.append(np.concatenate(rows))
        return torch.from_numpy(np.stack(outputs, 1))[None], chosen, margin


def watched(state):
    """Let `state` note the spans it chooses: one list of sets per KV head and query."""
    noted, choose = [], state._choose

    def noting(gates, count):
        chosen = choose(gates, count)
        noted.extend({s for s in row.tolist() if s >= 0} for row in chosen.flatten(0, 1))
        return chosen

    state._choose = noting
    return noted


@given(
    seed=st.integers(0, 9999),
    tokens=st.integers(1, 90),
    budget=st.integers(20, 60),
    alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0, 50.0]),
    routed=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "anchors": st.booleans(),
            "weights": st.sampled_from(["surprisal", "uniform"]),
            "threshold": st.sampled_from([None, None, 0.0, 0.7, 1.0]),
            "quantile": st.sampled_from([0.0, 0.5, 0.9]),
            "max_length": st.sampled_from([7, None]),
            "trail": st.integers(0, 3),
        }
    ),
)
def test_a_step_equals_the_paper_by_plain_loops(seed, tokens, budget, alpha, routed, options):
    router = random_router(seed) if routed else None
    method = SeKV(budget=budget, alpha=alpha, fit=None, router=router, **SMALL | options)
    try:
        layer = Layer(method, seed, tokens)
    except BudgetTooSmallError:
        assume(False)
    reference = Reference(method, layer.row, layer.surprisal, budget)
    spans = layer.plan.spans[0]
    assert spans.exact.tolist() == reference.exact
    cut = [part.tolist() for part in spans.tokens.split(spans.offsets.diff().tolist())]
    assert [part for part in cut if part] == reference.spans
    event(f"{min(len(reference.spans), 3)} spans or more")
    noted = watched(layer.state)
    for count in (1, 1, 3, 1):
        seed += 10
        new = drawn(seed, 1, 4, count, 6), drawn(seed + 1, 1, 2, count, 6)
        new = (*new, drawn(seed + 2, 1, 2, count, 7))
        wanted, chosen, margin = reference.step(*new)
        assume(margin > 1e-4)
        noted.clear()
        got = layer.state.step(*new, valid=None, scale=0.4)
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=2e-4)
        if reference.spans:
            # where none can be expanded nothing chooses
            assert noted == (chosen if layer.state.store is not None else [])
            assert noted or not any(chosen)
            event(f"expands: {any(chosen)}")
    assert int(layer.state.entries().max()) <= max(budget, 1)


@functools.cache
def embedded():
    folder = model_path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder), haystack.read_keys(folder)


def test_a_real_prompt_equals_the_paper_by_plain_loops(monkeypatch):
    model, tokenizer, keys = embedded()
    ids = torch.tensor(
        [haystack.needle_prompt(tokenizer, context=400, depth=0.5, keys=keys, seed=1).ids]
    )
    method = SeKV(budget=0.5, window=32, alpha=2.0, fit=None, sinks=1)
    rows, steps, surprisals = {}, [], []
    compress, step, finish = SeKV._compress_row, SpanMemory.step, SpanPlan.finish

    def compressing(self, row, spans, routed):
        held = Row(0, row.queries.clone(), row.keys.clone(), row.values.clone(), row.scale)
        made = compress(self, row, spans, routed)
        rows[row.layer] = held
        return made

    def stepping(self, queries, new_keys, new_values, **options):
        out = step(self, queries, new_keys, new_values, **options)
        steps.append((queries, new_keys, new_values, out))
        return out

    def finishing(self, surprisal):
        surprisals.extend(surprisal)
        finish(self, surprisal)

    monkeypatch.setattr(SeKV, "_compress_row", compressing)
    monkeypatch.setattr(SpanMemory, "step", stepping)
    monkeypatch.setattr(SpanPlan, "finish", finishing)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method)
        logits = model(ids, past_key_values=cache).logits.double().log_softmax(-1)
        for token in (5, 6):
            model(torch.tensor([[token]]), past_key_values=cache)
    wanted = -logits[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    close(surprisals[0][1:].double(), wanted)
    tokens = ids.shape[1]
    assert cache.report().layers[0].details["spans"][0] > 3
    for layer, row in rows.items():
        reference = Reference(method, row, surprisals[0], tokens // 2)
        for queries, new_keys, new_values, out in steps[layer :: len(rows)]:
            expected, chosen, margin = reference.step(queries, new_keys, new_values)
            assert margin > 1e-6 and any(chosen)
            torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=2e-3)


@given(
    st.integers(0, 999),
    st.integers(20, 300),
    st.floats(0.1, 0.9),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([6, 7, 12, None]),
    st.integers(0, 3),
)
def test_alpha_rises_no_further_than_the_budget_asks(
    seed, tokens, share, fit, anchors, max_length, trail
):
    """As many of the most surprising tokens are boundaries as leave the resident share; one more
    would be too many. Spans are cut to expand the largest share of them; if none can be, the
    boundaries may take all."""
    options = SMALL | {"anchors": anchors, "alpha": 0.5, "max_length": max_length, "trail": trail}
    method = SeKV(budget=max(int(share * tokens), 8), fit=fit, **options)
    h, granted = surprisal_of(seed, tokens), method.budget
    assume(tokens > granted)
    first, stop = slow.shares(tokens, granted, 5, 1)
    ranked = sorted(range(first, stop), key=lambda t: -float(h[t]))
    every = sum(slow.boundaries([float(x) for x in h], 0.5)[first:stop])
    limit = granted - first - (tokens - stop)

    def cut(count, longest=None):
        marks = [t in ranked[:count] for t in range(tokens)]
        lengths = {"min_length": 3, "max_length": longest, "trail": trail}
        return slow.segment(marks, first, stop, anchors=anchors, **lengths)

    uncut = [sum(map(len, cut(count))) for count in range(every + 1)]

    def most(bound):
        if uncut[every] <= bound:
            return [every]
        return [k for k in range(every) if k == 0 or uncut[k] <= bound < uncut[k + 1]]

    def longest(count):
        best = (0, None)
        for size in range(6, (max_length or 0) + 1):
            exact, spans = cut(count, size)
            room = limit - len(exact) - len(spans)
            if spans:
                share = min(room // (size - 1), len(spans)) / len(spans)
                best = max(best, (share, size), key=lambda pair: pair[0])
        return best[1]

    possible = []
    for count in most(int(fit * limit)):
        size = longest(count)
        every_entry = size is None and max_length is not None
        possible += [cut(k) for k in most(limit)] if every_entry else [cut(count, size)]
    assume(all(len(exact) + len(spans) <= limit for exact, spans in possible))
    spans = SpanPlan(method).segmentation.spans(h, granted)
    parts = [part.tolist() for part in spans.tokens.split(spans.offsets.diff().tolist())]
    got = spans.exact.tolist()[first : stop - tokens], [p for p in parts if p]
    assert got in possible
    assert spans.room == limit - sum(map(len, got)) >= 0


def spans_of(h, granted, **options):
    return SpanPlan(SeKV(budget=granted, **SMALL | options)).segmentation.spans(h, granted)


def test_constant_surprisal_has_no_anchor():
    spans = spans_of(torch.full((50,), 2.5), 24)
    assert spans.exact.tolist() == [0, *range(45, 50)]
    assert sorted(spans.offsets.diff().tolist()) == [5] * 4 + [6] * 4
    whole = spans_of(torch.full((50,), 2.5), 24, max_length=None)
    assert whole.offsets.tolist() == [0, 44]  # one span
    assert torch.equal(whole.weights, torch.full((44,), 2.5))
    zero = spans_of(torch.zeros(50), 24)  # certain tokens weigh the same, too
    assert zero.weights.unique().numel() == 1 and zero.weights.min() > 0


def test_spans_are_short_enough_to_be_expanded():
    """Without anchors, between 4 sinks and a window of 76: 228 entries for 1,944 tokens."""
    spans = SpanPlan(SeKV(budget=308)).segmentation.spans(torch.full((2024,), 2.5), 308)
    assert int(spans.offsets.diff().max()) in (63, 64)
    assert spans.room >= 3 * 63
    few = SpanPlan(SeKV(budget=100)).segmentation.spans(torch.full((2024,), 2.5), 100)
    assert len(few.offsets) == 2  # 71 entries hold no more than one span of up to 64 at a time
    letter = SpanPlan(SeKV(budget=308, fit=None)).segmentation.spans(torch.ones(2024), 308)
    assert int(letter.offsets.diff().max()) in (63, 64)


def test_where_every_token_is_kept_the_budget_must_hold_it():
    """Every third token surprises: all runs between are short."""
    h = torch.tensor([1.0, 1.0, 9.0] * 30)
    with pytest.raises(ValueError, match="of 90 tokens, but 90 are always attended"):
        spans_of(h, 40, alpha=0.5, fit=None)
    fitted = spans_of(h, 40, alpha=0.5)  # alpha rises, and a span can be expanded
    assert fitted.room >= int(fitted.offsets.diff().max()) - 1
    assert spans_of(h, 90, alpha=0.5, fit=None).exact.tolist() == list(range(90))


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_prompt_within_the_budget_stays_whole(tokens):
    spans = spans_of(torch.zeros(tokens), 24)
    assert (spans.exact.tolist(), spans.room) == (list(range(tokens)), 0)
    assert len(spans.tokens) == 0 and spans.offsets.tolist() == [0]


@given(st.integers(2, 400), st.integers(1, 30), st.sampled_from(["surprisal", "fixed"]))
def test_the_least_budget_is_the_one_the_error_states(tokens, budget, segmentation):
    assume(budget < tokens)
    options = SMALL | {"segmentation": segmentation, "chunk_size": 6}
    h = surprisal_of(tokens, tokens)
    try:
        spans_of(h, budget, **options)
    except BudgetTooSmallError as error:
        least = error.least
        assert least > budget and f"a budget of at least {least} here" in str(error)
        ids = [torch.zeros(tokens, dtype=torch.long)]
        with pytest.raises(ValueError, match=f"a budget of at least {least} here"):
            SeKV(budget=least - 1, **options).begin(ids, Context(None))
        SeKV(budget=least, **options).begin(ids, Context(None))
        spans_of(h, least, **options)


def test_fixed_chunks_have_no_anchors():
    spans = spans_of(surprisal_of(0, 60), 40, segmentation="fixed", chunk_size=6)
    assert spans.exact.tolist() == [0, *range(55, 60)]
    assert spans.offsets.diff().tolist() == [6] * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_room_for_all_and_every_component_nothing_is_lost(dtype):
    method = SeKV(budget=20, threshold=0.0, **SMALL | {"max_rank": 6})
    layer = Layer(method, 3, 50)
    row, spans = layer.row, layer.plan.spans[0]
    row = Row(0, row.queries.to(dtype), row.keys.to(dtype), row.values[..., :6].to(dtype), 0.4)
    layer.plan.spans = [Spans(spans.exact, spans.tokens, spans.offsets, spans.weights, room=1000)]
    state = method.compress([row], layer.plan)
    new = [drawn(n, 1, heads, 1, 6).to(dtype) for n, heads in ((5, 4), (6, 2), (7, 2))]
    out = state.step(*new, valid=None, scale=0.4)
    keys, values = torch.cat([row.keys, new[1]], 2), torch.cat([row.values, new[2]], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        new[0].double(), keys.double(), values.double(), scale=0.4, enable_gqa=True
    )
    bound = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.04, "rtol": 0.02}
    torch.testing.assert_close(out.double(), expected, **bound)
    assert int(state.entries().max()) == 50


def test_factors_take_just_their_numbers_on_the_tier():
    for tier in ("host", "disk"):
        method = SeKV(budget=30, tier=tier, router=random_router(4), **SMALL)
        layer = Layer(method, 5, 80)
        store, sizes = layer.state.store, layer.plan.spans[0].offsets.diff()
        ranks = [r.view(2, -1) for r in store.ranks]
        assert len(ranks[0].unique()) > 1  # gates drop components of some spans
        numbers = (ranks[0] * (sizes + 6 + 1) + ranks[1] * (sizes + 7 + 1)).sum()
        assert store.records.nbytes[tier] == 4 * int(numbers)
        assert layer.state.nbytes()[tier] >= 4 * int(numbers)


def steps(state, count, *, seed=0, heads=4, dim=6):
    for n in range(count):
        q = drawn(seed + n, 1, heads, 1, dim)
        k, v = drawn(seed + n + 1, 1, 2, 1, dim), drawn(seed + n + 2, 1, 2, 1, dim + 1)
        state.step(q, k, v, valid=None, scale=0.4)


def test_what_is_selected_again_does_not_move_again():
    method = SeKV(budget=60, fit=0.3, quantile=0.0, **SMALL)
    state = Layer(method, 7, 100).state
    steps(state, 1)
    moved, traffic = state.store.bytes_moved, state.traffic()
    assert moved > 0 and traffic["hits"] == 0 < traffic["misses"]
    steps(state, 1)  # the same query
    assert state.store.bytes_moved == moved
    assert state.traffic()["hits"] == state.traffic()["misses"]
    held = set(state.store.slots)
    steps(state, 1, seed=50)
    assert state.store.bytes_moved > moved
    assert set(state.store.slots) != held
    chosen = sum(state.store.sizes)
    assert chosen <= 2 * (60 - max(state.resident)) + len(state.store.slots)


def test_zoom_in_rates_are_those_of_the_gates():
    for threshold, some in ((0.0, True), (1.0, False)):
        method = SeKV(budget=60, fit=0.3, threshold=threshold, **SMALL)
        state = Layer(method, 7, 100).state
        steps(state, 3)
        rates = state.details()["zoom_in"]
        assert len(rates) == 4 and all(0 <= rate <= 1 for rate in rates)
        assert all(rate > 0 for rate in rates) == some == (state.store.bytes_moved > 0)


def test_what_can_expand_nothing_holds_nothing_for_it():
    for options in ({"max_rank": 0}, {"max_length": None, "budget": 25}):
        method = SeKV(**{"budget": 30} | SMALL | options)
        layer = Layer(method, 7, 100)
        state, spans = layer.state, layer.plan.spans[0]
        assert len(spans.offsets) > 1 and (method.max_rank == 0 or not spans.expands)
        steps(state, 2)
        tiers = state.nbytes()
        means, sizes = state.keys.nbytes + state.values.nbytes, state.log_size.nbytes
        assert tiers["device"] == state.exact.nbytes + means + sizes + (4 + 1) * 8
        assert tiers["host"] == tiers["disk"] == 0
        assert state.details() == {"zoom_in": [0.0] * 4, "spans": [len(spans.offsets) - 1]}
        assert state.traffic() == {"bytes_moved": 0, "hits": 0, "misses": 0}


def test_the_plan_of_a_compressed_prompt_holds_nothing(tokenizer):
    with attach(shared("llama"), tokenizer) as kv, torch.no_grad():
        cache = kv.cache(SeKV(budget=24, **SMALL))
        shared("llama")(**prompt(60), past_key_values=cache)
        report = cache.report()
    assert cache.plan.nbytes == 0
    assert report.device_bytes == sum(layer.device_bytes for layer in report.layers)


def test_rows_of_one_prompt_share_its_factors(tokenizer):
    model = shared("llama")
    options = SMALL | {"routing_dim": 8}
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(SeKV(budget=24, **options))
        model(**prompt(60), past_key_values=cache)
        before = cache.report()
        cache.batch_repeat_interleave(3)
        after = cache.report()
    assert after.host_bytes == before.host_bytes
    assert after.batch == 3


def test_what_was_expected_is_there_when_it_is_asked_for():
    made = [Layer(SeKV(budget=60, fit=0.3, quantile=0.0, **SMALL), 7, 100).state for _ in range(2)]
    for n, (count, ahead) in enumerate(((1, True), (1, False), (3, True))):
        q, k, v = (drawn(n, 1, heads, count, 6 + (heads == 3)) for heads in (4, 2, 3))
        v = v[:, :2]
        if ahead:
            misses = made[1].traffic()["misses"]
            made[1].expect(q[:, :, -1:], scale=0.4)
            assert made[1].traffic()["misses"] == misses
        plain, expected = (state.step(q, k, v, valid=None, scale=0.4) for state in made)
        assert torch.equal(plain, expected)
        if n == 0:
            assert made[1].traffic()["misses"] == 0 < made[1].traffic()["hits"]
            assert made[0].traffic()["bytes_moved"] == made[1].traffic()["bytes_moved"] > 0
    assert made[0].details() == made[1].details()
    assert torch.equal(made[0].entries(), made[1].entries())


@settings(max_examples=30)
@given(
    family=st.sampled_from(["llama", "qwen3", "gemma3", "smollm3"]),
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(30, 60), min_size=1, max_size=2),
    budget=st.sampled_from([0.5, 0.7, 0.9]),
    tier=st.sampled_from(["host", "disk"]),
)
def test_what_is_fetched_ahead_changes_only_what_moves(
    tokenizer, family, seed, lengths, budget, tier
):
    model, inputs = build(family, seed=seed), prompt(*lengths, seed=seed)
    method = SeKV(budget=budget, quantile=0.0, fit=0.3, tier=tier, **SMALL)
    tokens = prompt(*[5] * len(lengths), seed=seed + 1)["input_ids"]
    runs = []
    with attach(model, tokenizer) as kv, torch.no_grad():
        for ahead in (False, True):
            cache = kv.cache(replace(method, lookahead=ahead))
            logits, chosen = [model(**inputs, past_key_values=cache).logits], []
            states = [layer.state for layer in cache.compressed]
            assert [n for n, state in enumerate(states) if state.looks_ahead] == (
                list(range(1, len(states))) if ahead else []
            )
            for state in states:
                state._count_zooms = lambda gates, mask, valid, chosen=chosen: chosen.append(mask)
            for token in tokens.split([1, 1, 2, 1], 1):
                logits.append(model(token, past_key_values=cache).logits)
            if family != "gemma3":  # whose window is full
                cache.crop(-1)
                logits.append(model(tokens[:, -1:], past_key_values=cache).logits)
            runs.append((torch.cat(logits, 1), chosen, cache.report()))
    (plain, spans, before), (guessing, same, after) = runs
    assert torch.equal(plain, guessing)
    assert len(spans) == len(same) and all(map(torch.equal, spans, same))
    for one, other in zip(before.layers, after.layers, strict=True):
        assert one.entries_attended == other.entries_attended
        assert one.hits + one.misses == other.hits + other.misses
    event(f"other bytes moved: {before.bytes_moved != after.bytes_moved}")
    event(f"other hits: {before.hit_rate != after.hit_rate}")


@given(
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    tier=st.sampled_from(["host", "disk"]),
    calls=st.lists(st.tuples(st.booleans(), st.lists(st.sets(st.integers(0, 7)), max_size=3))),
)
def test_a_store_holds_the_spans_that_were_asked_for_last(seed, dtype, tier, calls):
    """U and Sigma V^T as they are in the records, whatever was there before; and counts them."""
    offsets = torch.tensor([0, 1, 4, 9, 12])
    packed = [
        pack_spans(span_svd(drawn(seed + n, 1, 2, 12, width).to(dtype), offsets, rank), threshold=1)
        for n, (width, rank) in enumerate(((6, 3), (5, 4)))
    ]
    store = SpanStore([(packed[0], packed[1])], tier=tier, device=torch.device("cpu"))
    lengths = offsets.diff().tolist() * 2
    ranks = [x.ranks.flatten().tolist() for x in packed]
    shapes, held, moved, missed = [(store.rank[0], 6), (store.rank[1], 5)], set(), 0, 0
    for ahead, lists in calls:
        wanted = set().union(*lists)
        if not wanted <= held:
            new = wanted - held
            tokens = sum(lengths[i] for i in new)
            moved += sum(r * (tokens + len(new) * (d + 1)) for r, d in shapes) * dtype.itemsize
            missed, held = missed + (0 if ahead else tokens), wanted
        lists = [sorted(spans) for spans in lists]
        if ahead or not lists:
            store.prefetch(lists)
            slots = [[store.slots[i] for i in spans] for spans in lists]
        else:
            slots = store.fetch(lists).tolist()
        assert set(store.slots) == held
        assert (store.bytes_moved, store.missed_tokens) == (moved, missed)
        for spans, row in zip(lists, slots, strict=True):
            assert row[len(spans) :] == [-1] * (len(row) - len(spans))
            for span, slot in zip(spans, row, strict=False):
                rest = store.records.read([span])[0]
                rows = slice(int(store.offsets[slot]), int(store.offsets[slot + 1]))
                for kind, (most, width) in enumerate(shapes):
                    r, n = ranks[kind][span], lengths[span]
                    u, sigma, vh, rest = rest.split(
                        [r * n, r, r * width, len(rest) - r * (n + 1 + width)]
                    )
                    left, right = store.factors[2 * kind][rows], store.factors[2 * kind + 1][slot]
                    assert left.shape == (n, most) and right.shape == (most, width)
                    assert torch.equal(left[:, :r], u.view(n, r)) and not left[:, r:].any()
                    assert torch.equal(right[:r], vh.view(r, width) * sigma[:, None])
                    assert not right[r:].any()
                assert not len(rest)


GRANITE = {"logits_scaling": 5.0, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}


def granite():
    torch.manual_seed(0)
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return GraniteForCausalLM(GraniteConfig(**GRANITE, **more)).eval()


def scaled(family, **fields):
    """A model whose LM head scales or caps what it makes."""
    model = build(family)
    for name, value in fields.items():
        setattr(model.config, name, value)
        if hasattr(model, name):
            setattr(model, name, value)
    return model


@pytest.mark.parametrize("chunk", [None, 7, 16])
@pytest.mark.parametrize("kind", ["llama", "cohere2", "granite", "gemma3", "gpt2"])
def test_surprisal_is_that_of_the_models_own_logits(kind, chunk, tokenizer, monkeypatch):
    model = {
        "llama": lambda: shared("llama"),
        "cohere2": lambda: scaled("cohere2", logit_scale=0.3),
        "granite": granite,
        "gemma3": lambda: scaled("gemma3", final_logit_softcapping=2.0),
        "gpt2": lambda: shared("gpt2"),
    }[kind]()
    inputs, found, finish = prompt(40, 23, 1), [], SpanPlan.finish

    def finishing(self, surprisal):
        found.extend(surprisal)
        finish(self, surprisal)

    monkeypatch.setattr(SpanPlan, "finish", finishing)
    with attach(model, tokenizer) as kv, torch.no_grad():
        generate(model, inputs, kv.cache(SeKV(budget=1.0)), new=2, prefill_chunk_size=chunk)
        for row, length in enumerate((40, 23, 1)):
            ids = inputs["input_ids"][row, None, 40 - length :]
            logits = model(ids).logits[0].double().log_softmax(-1)
            wanted = torch.zeros(length, dtype=torch.float64)
            wanted[1:] = -logits[:-1].gather(-1, ids[0, 1:, None])[:, 0]
            close(found[row].double(), wanted)


def test_a_model_without_an_lm_head_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"sekv needs the surprisal .* this model has no LM head"):
        KVCache(shared("llama").config, SeKV(), Context(tokenizer, None))


def test_a_budget_that_only_the_text_shows_too_small_leaves_the_cache_resettable(tokenizer):
    model, inputs = shared("llama"), prompt(60)
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(SeKV(budget=20, fit=None, alpha=0.0, **SMALL))
        with pytest.raises(ValueError, match="are always attended"):
            model(**inputs, past_key_values=cache)
        with pytest.raises(ValueError, match="reset"):
            model(torch.tensor([[5]]), past_key_values=cache)
        cache.reset()
        cache.method = SeKV(budget=1.0)
        assert torch.equal(model(**inputs, past_key_values=cache).logits, model(**inputs).logits)


def test_a_budget_below_the_least_is_refused_before_anything_runs(tokenizer):
    model = shared("llama")
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(SeKV(budget=0.05, min_length=3, max_length=6))
        with pytest.raises(ValueError, match="needs a budget of at least 6 here"):
            model(**prompt(60), past_key_values=cache)
        assert cache.get_seq_length() == 0
        assert generate(model, prompt(1), cache)[0].shape[1] > 1  # as if it had not been tried


def test_a_router_of_another_shape_is_refused():
    method = SeKV(budget=24, router=random_router(0, heads=8), **SMALL)
    with pytest.raises(ValueError, match="router was made for 1 layers of 8 query heads of size 6"):
        Layer(method, 0, 60)
    with pytest.raises(ValueError, match="max_rank is 32, but the router gates 4"):
        SeKV(router=random_router(0))
    with pytest.raises(TypeError, match="router must be a Router, a file or None, got 3"):
        SeKV(router=3)


def test_a_router_may_be_a_file(tokenizer, tmp_path):
    model, other, file = shared("llama"), build("llama", seed=1), tmp_path / "router.safetensors"
    router = random_router(3, layers=3, dim=16)
    router.save(file, model=model)
    with attach(model, tokenizer) as kv:
        expected = generate(model, prompt(60), kv.cache(SeKV(budget=30, router=router, **SMALL)))[1]
        for path in (file, str(file)):
            cache = kv.cache(SeKV(budget=30, router=path, **SMALL))
            assert torch.equal(generate(model, prompt(60), cache)[1], expected)
        with pytest.raises(FileNotFoundError):
            kv.cache(SeKV(router="nothing"))
    with attach(other, tokenizer) as kv, pytest.raises(FingerprintError):
        kv.cache(SeKV(router=file))


WRONG = [
    ({"window": 0}, "window must be at least 1, got 0"),
    ({"min_length": 0}, "min_length must be at least 1, got 0"),
    ({"max_rank": -1}, "max_rank must be at least 0, got -1"),
    ({"routing_dim": 0}, "routing_dim must be at least 1, got 0"),
    ({"sinks": -1}, "sinks must be at least 0, got -1"),
    ({"alpha": -0.5}, "alpha must be finite and at least 0, got -0.5"),
    ({"alpha": math.nan}, "alpha must be finite and at least 0, got nan"),
    ({"max_length": 31}, "max_length must be at least twice min_length 16, got 31"),
    ({"chunk_size": 15}, "chunk_size must be at least min_length 16, got 15"),
    ({"fit": 1.5}, r"fit must be in \[0, 1\] or None, got 1.5"),
    ({"quantile": 1.0}, r"quantile must be in \[0, 1\), got 1.0"),
    ({"threshold": 1.1}, r"threshold must be in \[0, 1\], got 1.1"),
    ({"segmentation": "words"}, "segmentation must be 'surprisal' or 'fixed', got 'words'"),
    ({"weights": "none"}, "weights must be 'surprisal' or 'uniform', got 'none'"),
    ({"tier": "cloud"}, "tier must be 'host' or 'disk', got 'cloud'"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_wrong_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        SeKV(**options)


def test_a_plan_without_surprisal_is_refused():
    method = SeKV(budget=24, **SMALL)
    layer = Layer(method, 0, 60)
    with pytest.raises(TypeError, match="plan must be the one that begin"):
        method.compress([layer.row], SpanPlan(method))


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 16}, {"num_beams": 2}], ids=str)
def test_with_a_router_a_padded_row_equals_that_row_alone(tokenizer, options):
    model, batch = shared("llama"), prompt(60, 7, 41)
    router = random_router(3, layers=3, dim=16)
    method = SeKV(budget=30, router=router, **SMALL)
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        together, logits = generate(model, batch, cache, **options)
        assert any(rate > 0 for layer in cache.report().layers for rate in layer.details["zoom_in"])
        for row, length in enumerate((60, 7, 41)):
            alone = {name: x[row : row + 1, 60 - length :] for name, x in batch.items()}
            tokens, row_logits = generate(model, alone, kv.cache(method), **options)
            assert torch.equal(together[row, 60 - length :], tokens[0])
            if "num_beams" not in options:
                close(logits[:, row], row_logits[:, 0])


@pytest.mark.parametrize("ours", [{"num_assistant_tokens": 5}, {"prompt_lookup_num_tokens": 6}])
def test_a_draft_that_comes_with_the_prompt_is_answered_from_what_is_held(tokenizer, ours):
    """The prompt's end and the first draft come in one forward pass: it runs as two."""
    model, inputs = shared("gemma3"), prompt(60)
    method = SeKV(budget=30, quantile=0.0, **SMALL | {"routing_dim": 8})
    run = {"max_new_tokens": 10, "do_sample": False}
    if "num_assistant_tokens" in ours:
        ours = {"assistant_model": build("llama", seed=1)}
    with attach(model, tokenizer) as kv:
        expected = model.generate(**inputs, past_key_values=kv.cache(method), **run)
        cache = kv.cache(method)
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **run, **ours), expected)
        assert cache.report().prompt_tokens == 60
        tokens = torch.cat([inputs["input_ids"], torch.tensor([[5, 6, 7]])], 1)
        with torch.no_grad():
            parts = [tokens[:, :60], tokens[:, 60:]]
            cache = kv.cache(method)
            apart = [model(part, past_key_values=cache).logits for part in parts]
            cache = kv.cache(method, prompt_length=60)
            out = model(tokens, past_key_values=cache, output_hidden_states=True)
            close(out.logits, torch.cat(apart, 1))
            assert all(hidden.shape[1] == 63 for hidden in out.hidden_states)
            both = kv.cache(method, prompt_length=60)
            assert torch.equal(
                model(tokens, past_key_values=both, return_dict=False)[0], out.logits
            )
