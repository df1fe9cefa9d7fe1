from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kv_policies as kp

scores = st.one_of(st.integers(-2, 2).map(float), st.just(-math.inf), st.floats(-9, 9, width=32))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int], int]:
    """Scores [B, H, S], lengths [B or 1, H or 1, S], one budget per row, K."""
    b, h, s = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 6))
    rows, heads = draw(st.sampled_from([(1, 1), (b, 1), (b, h)]))
    cells = st.lists(st.integers(0, 4), min_size=rows * heads * s, max_size=rows * heads * s)
    lengths = torch.tensor(draw(cells), dtype=torch.int64).view(rows, heads, s)
    values = draw(st.lists(scores, min_size=b * h * s, max_size=b * h * s))
    budgets = draw(st.lists(st.integers(0, 26), min_size=b, max_size=b))
    return torch.tensor(values).view(b, h, s), lengths, budgets, draw(st.integers(0, 26))


def slow(segments: list[float], lengths: list[int], budget: int, size: int) -> list[int]:
    """Segments one after the other, each from its first token on."""
    kept: list[int] = []
    for k in sorted(range(len(segments)), key=lambda k: (-segments[k], k)):
        if segments[k] > -math.inf:
            start = sum(lengths[:k])
            kept += list(range(start, start + lengths[k]))[: min(budget, size) - len(kept)]
    return sorted(kept) + [-1] * (size - len(kept))


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))


@given(cases(), st.booleans())
def test_equals_filling_segment_by_segment(
    case: tuple[Tensor, Tensor, list[int], int], bfloat16: bool
) -> None:
    segments, lengths, budgets, size = case
    if bfloat16:
        segments = segments.bfloat16()
    offsets = offsets_of(lengths)
    if offsets.shape[1] == 1:
        offsets = offsets[:, 0] if len(offsets) > 1 else offsets[0, 0]
    got = kp.fill_segments(segments, offsets, budgets, size=size)
    lists = lengths.expand_as(segments)
    for i, budget in enumerate(budgets):
        for j in range(segments.shape[1]):
            expected = slow(segments[i, j].tolist(), lists[i, j].tolist(), budget, size)
            assert got[i, j].tolist() == expected


@given(cases())
def test_is_top_segments_where_tokens_fall_in_score(
    case: tuple[Tensor, Tensor, list[int], int],
) -> None:
    segments, lengths, budgets, _ = case
    lengths = lengths[:1, 0] + 1
    offsets = offsets_of(lengths)[0]
    tokens = int(offsets[-1])
    falling = -torch.arange(tokens, dtype=torch.float32).expand(*segments.shape[:2], -1)
    expected = kp.top_segments(segments, falling, offsets, budgets)
    got = kp.fill_segments(segments, offsets, budgets, size=expected.shape[-1])
    assert torch.equal(got, expected)


flat = torch.zeros(2, 3, 4)
cuts = torch.arange(5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((flat[0], cuts, 1, 1), ValueError, "segment_scores must have shape [B, H, S]"),
        ((flat.long(), cuts, 1, 1), TypeError, "segment_scores must be floating point"),
        ((flat, cuts.int(), 1, 1), TypeError, "offsets must be torch.int64"),
        ((flat, cuts[1:], 1, 1), ValueError, "offsets must have S + 1 = 5 entries"),
        ((flat, cuts.expand(3, 5), 1, 1), ValueError, "offsets must have shape [S + 1], [B, S"),
        ((flat, cuts.expand(2, 2, 5), 1, 1), ValueError, "offsets must have shape [S + 1], [B, S"),
        ((flat, cuts, -1, 1), ValueError, "budget must be at least 0, got -1"),
        ((flat, cuts, [1], 1), ValueError, "budget must have one entry for each of the 2 rows"),
        ((flat, cuts, 1, -1), ValueError, "size must be at least 0, got -1"),
        ((flat, cuts, 1, 1.0), TypeError, "size must be an int, got 1.0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refuses(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        kp.fill_segments(*arguments[:3], size=arguments[3])
    assert message in str(raised.value)


def test_a_batch_without_rows_keeps_nothing() -> None:
    kept = kp.fill_segments(torch.zeros(0, 2, 3), torch.arange(4), 2, size=2)
    assert kept.shape == (0, 2, 2) and kept.dtype == torch.int64
