from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kv_segment as ks
from kv_segment import offsets as blocks

surprisals = st.lists(st.integers(-40, 400).map(lambda v: v / 16), max_size=60)
alphas = st.floats(-2, 3, allow_nan=False).map(lambda a: round(a, 3))
min_lengths = st.integers(1, 8)


def slow(h: list[float], alpha: float, min_length: int) -> tuple[list[int], list[bool]]:
    """The threshold, then each maximal stretch without an anchor, one token at a time."""
    n = len(h)
    mean = sum(h) / n
    threshold = mean + alpha * (sum((v - mean) ** 2 for v in h) / n) ** 0.5
    spread = max(h) - min(h)
    assume(spread == 0 or all(abs(v - threshold) > 1e-9 for v in h))
    anchors = [spread > 0 and v > threshold for v in h]
    exact = list(anchors)
    t = 0
    while t < n:
        end = t
        while end < n and not anchors[end]:
            end += 1
        if end - t < min_length:
            exact[t:end] = [True] * (end - t)
        t = end + 1
    return [0, *(t for t in range(1, n) if exact[t] != exact[t - 1]), n], exact


@given(surprisals.filter(bool), alphas, min_lengths)
def test_equals_the_sequential_definition(h: list[float], alpha: float, shortest: int) -> None:
    offsets, anchors = ks.by_surprisal(h, alpha, shortest)
    expected_offsets, expected = slow(h, alpha, shortest)
    assert anchors.tolist() == expected
    assert offsets.tolist() == expected_offsets


@given(surprisals, alphas, min_lengths, st.integers(-(2**20), 2**20).map(lambda v: v / 16))
def test_a_constant_added_to_every_surprisal_changes_nothing(
    h: list[float], alpha: float, shortest: int, constant: float
) -> None:
    offsets, anchors = ks.by_surprisal(h, alpha, shortest)
    moved, moved_anchors = ks.by_surprisal([v + constant for v in h], alpha, shortest)
    assert moved.tolist() == offsets.tolist()
    assert moved_anchors.tolist() == anchors.tolist()


@given(st.lists(st.floats(0, 30, width=32), max_size=60), alphas, min_lengths, st.floats(-1e3, 1e3))
def test_any_constant_changes_nothing_beyond_rounding(
    h: list[float], alpha: float, shortest: int, constant: float
) -> None:
    """Any real number may be added where no value lies on the threshold itself."""
    values = np.array(h, dtype=np.float64)
    if h:
        threshold = values.mean() + alpha * values.std()
        assume(np.ptp(values) > 1e-6 and np.abs(values - threshold).min() > 1e-9)
    offsets, anchors = ks.by_surprisal(values, alpha, shortest)
    moved, moved_anchors = ks.by_surprisal(values + constant, alpha, shortest)
    assert moved.tolist() == offsets.tolist()
    assert moved_anchors.tolist() == anchors.tolist()


@given(surprisals, alphas, min_lengths, st.integers(1, 9))
def test_the_block_size_does_not_show(
    h: list[float], alpha: float, shortest: int, block: int
) -> None:
    offsets, anchors = ks.by_surprisal(h, alpha, shortest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        again, anchors_again = ks.by_surprisal(h, alpha, shortest)
    assert again.tolist() == offsets.tolist()
    assert anchors_again.tolist() == anchors.tolist()


@given(surprisals, alphas, min_lengths)
def test_each_segment_is_all_anchors_or_a_long_span(
    h: list[float], alpha: float, shortest: int
) -> None:
    offsets, anchors = ks.by_surprisal(np.array(h, dtype=np.float32), alpha, shortest)
    ks.check_offsets(offsets, len(h))
    assert anchors.dtype == np.bool_ and anchors.shape == (len(h),)
    for a, b in itertools.pairwise(offsets):
        inside = set(anchors[a:b].tolist())
        assert inside == {True} or (inside == {False} and b - a >= shortest)


@given(surprisals, alphas, min_lengths, min_lengths)
def test_a_larger_min_length_keeps_more(h: list[float], alpha: float, one: int, other: int) -> None:
    few = ks.by_surprisal(h, alpha, min(one, other))[1]
    many = ks.by_surprisal(h, alpha, max(one, other))[1]
    assert not (few & ~many).any()


@given(st.floats(-50, 50), st.integers(1, 40))
def test_equal_surprisals_have_no_anchor(value: float, n: int) -> None:
    offsets, anchors = ks.by_surprisal([value] * n, 0.0, 1)
    assert offsets.tolist() == [0, n]
    assert not anchors.any()


def test_example_and_empty() -> None:
    offsets, anchors = ks.by_surprisal([1, 1, 1, 1, 9, 1, 9, 1, 1, 1], 1.0, 3)
    assert offsets.tolist() == [0, 4, 7, 10]
    assert anchors.tolist() == [False] * 4 + [True] * 3 + [False] * 3
    offsets, anchors = ks.by_surprisal([7.5], 1.0, 1)
    assert offsets.tolist() == [0, 1] and anchors.tolist() == [False]
    offsets, anchors = ks.by_surprisal([], 1.0, 16)
    assert offsets.tolist() == [0]
    assert anchors.shape == (0,)


@pytest.mark.parametrize(
    ("h", "alpha", "shortest", "error", "message"),
    [
        ([[1.0]], 1.0, 1, ValueError, r"h must have one dimension, got shape \(1, 1\)"),
        ([1.0, float("nan")], 1.0, 1, ValueError, r"h must be finite, got h\[1\] = nan"),
        ([float("inf")], 1.0, 1, ValueError, r"h must be finite, got h\[0\] = inf"),
        ([1j], 1.0, 1, TypeError, "h must hold real numbers, got dtype complex128"),
        ([1.0], float("inf"), 1, ValueError, "alpha must be finite, got inf"),
        ([1.0], float("nan"), 1, ValueError, "alpha must be finite, got nan"),
        ([[1.0], []], 1.0, 1, ValueError, r"h must be an array, got \[\[1.0\], \[\]\]"),
        ([1.0], 1.0, 0, ValueError, "min_length must be at least 1, got 0"),
    ],
)
def test_refuses(
    h: list[float], alpha: float, shortest: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ks.by_surprisal(h, alpha, shortest)
