from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kv_policies as kp
from kv_policies import blocks

# Small dyadic numbers: sums and comparisons are exact in both implementations.
dyadic = st.one_of(st.integers(0, 40).map(lambda v: v / 8), st.just(-math.inf))
deltas = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.875, 1.0])


@st.composite
def cases(draw: st.DrawFn, distinct: bool = False) -> tuple[Tensor, Tensor, int, int]:
    b, h, n = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 40))
    if distinct:
        seed = draw(st.integers(0, 2**32 - 1))
        order = np.random.default_rng(seed).permutation(b * h * n)
        scores = torch.from_numpy(order + 1.0).float().view(b, h, n) / 8
    else:
        flat = draw(st.lists(dyadic, min_size=b * h * n, max_size=b * h * n))
        scores = torch.tensor(flat).view(b, h, n)
    few = min(4, n - 1)
    batched = draw(st.booleans())
    rows = []
    for _ in range(b if batched else 1):
        cuts = draw(st.sets(st.integers(1, n - 1), max_size=few)) if n > 1 else set()
        rows.append([0, *sorted(cuts), n])
    width = max(map(len, rows))
    offsets = torch.tensor([r + [n] * (width - len(r)) for r in rows])
    budget = draw(st.integers(0, n + 2))
    return scores, offsets if batched else offsets[0], budget, draw(st.integers(1, 9))


def slow_segment(scores: list[float], quota: int, max_block: int, delta: float) -> set[int]:
    """Algorithm 2 for one segment, as printed: positions that are kept."""
    n = len(scores)
    allowed = [t for t in range(n) if scores[t] > -math.inf]
    best = sorted(allowed, key=lambda t: (-scores[t], t))[:quota]
    for size in range(min(max_block, quota), 0, -1):
        groups = []
        for start in range(0, n, size):
            group = [t for t in range(start, min(start + size, n)) if t in allowed]
            if group:
                mean = sum(scores[t] for t in group) / len(group)
                groups.append((-float(np.float32(mean)), start, group))
        kept: list[int] = []
        for _, _, group in sorted(groups):
            room = quota - len(kept)
            ranked = sorted(group, key=lambda t: (-scores[t], t))
            kept += ranked[:room]
        if sum(scores[t] for t in kept) >= delta * sum(scores[t] for t in best):
            return set(kept)
    return set(best)


def slow(
    scores: list[float], offsets: list[int], budget: int, max_block: int, delta: float
) -> list[int]:
    n = len(scores)
    order = sorted(range(n), key=lambda t: (-scores[t], t))
    top = {t for t in order[:budget] if scores[t] > -math.inf}
    kept: list[int] = []
    for a, b in itertools.pairwise(offsets):
        quota = sum(a <= t < b for t in top)
        kept += [a + t for t in slow_segment(scores[a:b], quota, max_block, delta)]
    return sorted(kept) + [-1] * (min(budget, n) - len(kept))


def rows_of(scores: Tensor, offsets: Tensor) -> list[tuple[int, int, list[float], list[int]]]:
    b, h = scores.shape[:2]
    table = offsets if offsets.ndim == 2 else offsets.expand(b, -1)
    return [
        (i, j, scores[i, j].double().tolist(), table[i].tolist())
        for i in range(b)
        for j in range(h)
    ]


Case = tuple[Tensor, Tensor, int, int]


@given(cases(), deltas.filter(lambda d: d < 1))
def test_equals_the_algorithm_segment_by_segment(case: Case, delta: float) -> None:
    scores, offsets, budget, max_block = case
    got = kp.adaptive_blocks(scores, offsets, budget, max_block=max_block, delta=delta)
    for i, j, row, cuts in rows_of(scores, offsets):
        assert got[i, j].tolist() == slow(row, cuts, budget, max_block, delta)


@given(cases(), deltas.filter(lambda d: d < 1), st.sampled_from([2, 4, 1024]))
def test_padding_does_not_show(case: Case, delta: float, narrowest: int) -> None:
    scores, offsets, budget, max_block = case
    expected = kp.adaptive_blocks(scores, offsets, budget, max_block=max_block, delta=delta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_NARROWEST", narrowest)
        got = kp.adaptive_blocks(scores, offsets, budget, max_block=max_block, delta=delta)
    assert torch.equal(got, expected)


@given(st.integers(0, 2**32 - 1), st.floats(0, 0.999), st.integers(1, 24), st.integers(1, 120))
def test_equals_the_algorithm_on_attention_like_scores(
    seed: int, delta: float, max_block: int, budget: int
) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 150))
    scores = torch.from_numpy(rng.dirichlet(np.full(n, 0.2), (1, 2))).float()
    cuts = np.unique(rng.integers(1, n, int(rng.integers(0, 12))))
    offsets = torch.tensor([0, *cuts.tolist(), n])
    got = kp.adaptive_blocks(scores, offsets, budget, max_block=max_block, delta=delta)
    for i, j, row, own in rows_of(scores, offsets):
        assert got[i, j].tolist() == slow(row, own, budget, max_block, delta)


@given(cases(distinct=True), st.integers(1, 9))
def test_delta_one_and_block_one_are_token_level(case: Case, max_block: int) -> None:
    scores, offsets, budget, _ = case
    expected = kp.top_tokens(scores, budget)
    loose = kp.adaptive_blocks(scores, offsets, budget, max_block=1, delta=0.0)
    strict = kp.adaptive_blocks(scores, offsets, budget, max_block=max_block, delta=1.0)
    assert torch.equal(loose, expected)
    assert torch.equal(strict, expected)
    for i, j, row, cuts in rows_of(scores, offsets):
        assert strict[i, j].tolist() == slow(row, cuts, budget, max_block, 1.0)


@given(cases(), deltas)
def test_each_segment_keeps_its_count_and_delta_of_its_score(case: Case, delta: float) -> None:
    scores, offsets, budget, max_block = case
    got = kp.adaptive_blocks(scores, offsets, budget, max_block=max_block, delta=delta)
    best = kp.top_tokens(scores, budget)
    for i, j, row, cuts in rows_of(scores, offsets):
        kept, top = ([t for t in x[i, j].tolist() if t >= 0] for x in (got, best))
        assert kept == sorted(set(kept)) and len(kept) == len(top)
        assert all(row[t] > -math.inf for t in kept)
        for a, b in itertools.pairwise(cuts):
            ours, theirs = ([row[t] for t in x if a <= t < b] for x in (kept, top))
            assert len(ours) == len(theirs)
            assert sum(ours) >= delta * sum(theirs)


def test_example_keeps_a_phrase_together() -> None:
    scores = torch.tensor([[[0.0, 0, 8, 0, 5, 5, 6, 6, 0, 7]]])
    offsets = torch.tensor([0, 10])
    assert kp.adaptive_blocks(scores, offsets, 4, max_block=2, delta=0.8).tolist() == [
        [[4, 5, 6, 7]]
    ]
    assert kp.adaptive_blocks(scores, offsets, 4, max_block=2, delta=1.0).tolist() == [
        [[2, 6, 7, 9]]
    ]


ok, cuts = torch.zeros(1, 1, 4), torch.tensor([0, 2, 4])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((ok - 1, cuts, 2), {}, ValueError, r"at least 0 or -inf, got -1.0 at \(0, 0, 0\)"),
        ((ok.int(), cuts, 2), {}, TypeError, "scores must be floating point, got torch.int32"),
        ((ok[0], cuts, 2), {}, ValueError, r"scores .*\[B, H, N\].* got \[1, 4\]"),
        ((ok, cuts, 2), {"delta": math.nan}, ValueError, "delta .* got nan"),
        ((ok, cuts, 1.0), {}, TypeError, "budget must be an int, got 1.0"),
        ((ok, torch.tensor([0, 2, 5]), 2), {}, ValueError, r"end at 4 .* got \[0, 2, 5\]"),
        ((ok / 0, cuts, 2), {}, ValueError, "scores must be finite or -inf, got nan"),
        ((ok, cuts, -2), {}, ValueError, "budget must be at least 0, got -2"),
        ((ok, cuts, 2), {"max_block": 0}, ValueError, "max_block must be at least 1, got 0"),
        ((ok, cuts, 2), {"delta": 1.5}, ValueError, r"delta .*\[0, 1\], got 1.5"),
        ((ok, torch.tensor([0, 3, 2, 4]), 2), {}, ValueError, r"offsets .*\[0, 3, 2, 4\]"),
        ((ok, cuts.to("meta"), 2), {}, ValueError, "offsets must be on the device of scores, cpu"),
    ],
)
def test_refuses(args: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kp.adaptive_blocks(*args, **options)


def test_no_tokens() -> None:
    assert kp.adaptive_blocks(torch.zeros(1, 2, 0), torch.tensor([0]), 3).shape == (1, 2, 0)
