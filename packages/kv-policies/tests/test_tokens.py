from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kv_policies as kp

# Few distinct values, so that equal scores are common.
values = st.one_of(
    st.integers(-3, 3).map(float), st.just(-math.inf), st.floats(-(2.0**100), 2.0**100, width=32)
)


@st.composite
def score_tensors(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Tensor:
    b, h, n = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 12))
    flat = draw(st.lists(values, min_size=b * h * n, max_size=b * h * n))
    return torch.tensor(flat, dtype=torch.float64).to(dtype).view(b, h, n)


@st.composite
def masks(draw: st.DrawFn, scores: Tensor) -> Tensor:
    b, h, n = scores.shape
    b, h = draw(st.sampled_from([1, b])), draw(st.sampled_from([1, h]))
    flat = draw(st.lists(st.booleans(), min_size=b * h * n, max_size=b * h * n))
    return torch.tensor(flat, dtype=torch.bool).view(b, h, n)


def slow(row: list[float], budget: int, protected: list[bool]) -> list[int]:
    order = sorted(range(len(row)), key=lambda t: (not protected[t], -row[t], t))
    kept = sorted([t for t in order if row[t] > -math.inf][:budget])
    return kept + [-1] * (min(budget, len(row)) - len(kept))


budgets = st.integers(0, 15)


@given(score_tensors(), budgets)
def test_equals_a_sort(scores: Tensor, budget: int) -> None:
    got = kp.top_tokens(scores, budget)
    assert got.dtype == torch.int64
    for row, found in zip(scores.flatten(0, 1), got.flatten(0, 1), strict=True):
        assert found.tolist() == slow(row.double().tolist(), budget, [False] * len(row))


@given(st.data(), budgets)
def test_protected_tokens_are_always_in(data: st.DataObject, extra: int) -> None:
    scores = data.draw(score_tensors())
    protected = data.draw(masks(scores))
    wide = protected.expand(scores.shape)
    budget = extra + (int(wide.sum(-1).max()) if wide.numel() else 0)
    got = kp.top_tokens(scores, budget, protected=protected).flatten(0, 1)
    rows = zip(scores.flatten(0, 1), wide.flatten(0, 1), got, strict=True)
    for row, kept, found in rows:
        assert found.tolist() == slow(row.double().tolist(), budget, kept.tolist())


@given(score_tensors(), budgets)
def test_no_token_left_out_beats_one_that_is_in(scores: Tensor, budget: int) -> None:
    for row, found in zip(
        scores.flatten(0, 1), kp.top_tokens(scores, budget).flatten(0, 1), strict=True
    ):
        inside = [t for t in found.tolist() if t >= 0]
        assert inside == sorted(set(inside))
        assert len(inside) == min(budget, int((row > -math.inf).sum()))
        outside = [row[t] for t in range(len(row)) if t not in inside]
        assert not inside or all(v <= row[inside].min() for v in outside)


@given(st.data(), score_tensors())
def test_rows_may_have_budgets_of_their_own(data: st.DataObject, scores: Tensor) -> None:
    each = data.draw(st.lists(budgets, min_size=len(scores), max_size=len(scores)))
    got = kp.top_tokens(scores, each)
    for row, budget, found in zip(scores, each, got, strict=True):
        alone = kp.top_tokens(row[None], budget)[0]
        assert torch.equal(found[..., : alone.shape[-1]], alone)
        assert bool((found[..., alone.shape[-1] :] == -1).all())


@given(score_tensors(), budgets, budgets)
def test_a_larger_budget_keeps_more(scores: Tensor, one: int, other: int) -> None:
    few, many = (kp.top_tokens(scores, b) for b in sorted((one, other)))
    for small, large in zip(few.flatten(0, 1), many.flatten(0, 1), strict=True):
        assert set(small.tolist()) - {-1} <= set(large.tolist())


@given(score_tensors(torch.bfloat16), budgets, st.booleans())
def test_half_precision_and_unchecked_give_the_same(
    scores: Tensor, budget: int, check: bool
) -> None:
    expected = kp.top_tokens(scores.double(), budget)
    assert torch.equal(kp.top_tokens(scores, budget, check=check), expected)


@given(st.integers(0, 20), st.integers(0, 25), st.integers(0, 25))
def test_window_and_sinks_are_the_ends(n: int, window: int, sinks: int) -> None:
    tokens = list(range(n))
    assert kp.keep_window(n, window).nonzero()[:, 0].tolist() == tokens[max(0, n - window) :]
    assert kp.keep_sinks(n, sinks).nonzero()[:, 0].tolist() == tokens[:sinks]


@given(st.integers(0, 20), st.integers(0, 25), st.integers(0, 6), st.data())
def test_stream_window_keeps_the_ends_of_each_row(
    n: int, budget: int, sinks: int, data: st.DataObject
) -> None:
    starts = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=3))
    got = kp.stream_window(n, budget, sinks=sinks, starts=torch.tensor(starts))
    assert got.shape == (len(starts), 1, min(budget, n))
    for start, row in zip(starts, got[:, 0].tolist(), strict=True):
        real = list(range(start, n))
        first = real[: min(sinks, budget)]
        last = real[len(real) - min(len(real), budget - len(first)) :]
        kept = sorted({*first, *last})
        assert len(kept) == min(budget, len(real)) or sinks > len(real)
        assert row == kept + [-1] * (len(row) - len(kept))
    plain = kp.stream_window(n, budget, sinks=sinks)
    assert torch.equal(plain, kp.stream_window(n, budget, sinks=sinks, starts=torch.tensor([0])))


@given(st.integers(0, 12), st.integers(0, 6), st.data())
def test_sinks_of_padded_rows_start_at_their_first_token(
    n: int, sinks: int, data: st.DataObject
) -> None:
    starts = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=3))
    mask = kp.keep_sinks(n, sinks, starts=torch.tensor(starts))
    expected = [[[s <= t < s + sinks for t in range(n)]] for s in starts]
    assert mask.tolist() == expected


def test_masks_combine_to_protected() -> None:
    scores = torch.tensor([[[0.0, 5, 4, 3, 0, 0]]])
    protected = kp.keep_sinks(6, 1) | kp.keep_window(6, 1)
    assert kp.top_tokens(scores, 3, protected=protected).tolist() == [[[0, 1, 5]]]


def test_forbidden_wins_over_protected() -> None:
    scores = torch.tensor([[[-math.inf, 1.0, 2.0]]])
    protected = torch.tensor([True, False, False])
    assert kp.top_tokens(scores, 1, protected=protected).tolist() == [[[2]]]


nan = torch.tensor([[[0.0, math.nan]]])
flat = torch.zeros(1, 1, 2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kp.top_tokens(nan, 1), ValueError, r"scores .* got nan at \(0, 0, 1\)"),
        (lambda: kp.top_tokens(-nan / 0, 1), ValueError, "scores must be finite or -inf, got"),
        (lambda: kp.top_tokens(flat[0], 1), ValueError, r"scores .*\[B, H, N\].*got \[1, 2\]"),
        (lambda: kp.top_tokens(flat.long(), 1), TypeError, "scores .* got torch.int64"),
        (lambda: kp.top_tokens([1.0], 1), TypeError, "scores must be a torch.Tensor, got list"),
        (lambda: kp.top_tokens(flat, -1), ValueError, "budget must be at least 0, got -1"),
        (lambda: kp.top_tokens(flat, 1.5), TypeError, "budget must be an int, got 1.5"),
        (lambda: kp.top_tokens(flat, [1] * 9), ValueError, "budget must have one entry for each"),
        (
            lambda: kp.top_tokens(flat, 1, protected=torch.tensor([True, True])),
            ValueError,
            "protected must hold at most budget = 1 tokens, got 2",
        ),
        (
            lambda: kp.top_tokens(flat, 1, protected=torch.tensor([True])),
            ValueError,
            r"protected must broadcast to .* \[1, 1, 2\], got \[1\]",
        ),
        (
            lambda: kp.top_tokens(flat, 1, protected=torch.tensor([1, 0])),
            TypeError,
            "protected must be torch.bool, got torch.int64",
        ),
        (
            lambda: kp.top_tokens(
                flat, 1, protected=torch.zeros(2, dtype=torch.bool, device="meta")
            ),
            ValueError,
            "protected must be on the device of scores, cpu, got meta",
        ),
        (lambda: kp.keep_window(-1, 2), ValueError, "n must be at least 0, got -1"),
        (lambda: kp.keep_window(4, -2), ValueError, "window must be at least 0, got -2"),
        (lambda: kp.keep_sinks(4, -2), ValueError, "sinks must be at least 0, got -2"),
        (lambda: kp.stream_window(4, -2), ValueError, "budget must be at least 0, got -2"),
        (lambda: kp.stream_window(4, 2, sinks=-1), ValueError, "sinks must be .* got -1"),
        (
            lambda: kp.keep_sinks(4, 1, starts=torch.zeros(1, 1, dtype=torch.int64)),
            ValueError,
            r"starts must have shape \[B\] = \[any\], got \[1, 1\]",
        ),
        (
            lambda: kp.keep_sinks(4, 1, starts=torch.tensor([0, 5])),
            ValueError,
            r"starts must be in \[0, 4\], got 5 at \(1,\)",
        ),
        (
            lambda: kp.stream_window(4, 1, starts=torch.tensor([-1])),
            ValueError,
            r"starts must be in \[0, 4\], got -1 at \(0,\)",
        ),
        (lambda: kp.top_tokens(flat, 1, protected=[True]), TypeError, "protected .* got list"),
        (
            lambda: kp.stream_window(4, 1, starts=torch.zeros(1)),
            TypeError,
            "starts must be torch.int64, got torch.float32",
        ),
    ],
)
def test_refuses(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
