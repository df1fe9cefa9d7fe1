from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kv_policies as kp

few_values = st.one_of(
    st.integers(-2, 2).map(float), st.just(-math.inf), st.floats(-9, 9, width=32)
)


@st.composite
def cases(draw: st.DrawFn, batched: bool | None = None) -> tuple[Tensor, Tensor, Tensor, int]:
    b, h, n = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 14))
    batched = draw(st.booleans()) if batched is None else batched
    cuts = [
        sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
        for _ in range(b if batched else 1)
    ]
    rows = [[0, *c, n] if n else [0] for c in cuts]
    width = max(map(len, rows)) + (draw(st.integers(0, 2)) if batched else 0)
    offsets = torch.tensor([r + [n] * (width - len(r)) for r in rows])
    s = width - 1
    segment_scores = draw(st.lists(few_values, min_size=b * h * s, max_size=b * h * s))
    token_scores = draw(st.lists(few_values, min_size=b * h * n, max_size=b * h * n))
    return (
        torch.tensor(segment_scores).view(b, h, s),
        torch.tensor(token_scores).view(b, h, n),
        offsets if batched else offsets[0],
        draw(st.integers(0, 17)),
    )


def slow(segments: list[float], tokens: list[float], offsets: list[int], budget: int) -> list[int]:
    """Segments one after the other, tokens one after the other."""
    kept: list[int] = []
    for k in sorted(range(len(segments)), key=lambda k: (-segments[k], k)):
        if segments[k] == -math.inf:
            break
        members = [t for t in range(offsets[k], offsets[k + 1]) if tokens[t] > -math.inf]
        members.sort(key=lambda t: (-tokens[t], t))
        kept += members[: budget - len(kept)]
    return sorted(kept) + [-1] * (min(budget, len(tokens)) - len(kept))


def rows_of(case: tuple[Tensor, Tensor, Tensor, int]) -> list[tuple[Any, ...]]:
    segments, tokens, offsets, budget = case
    b, h = tokens.shape[:2]
    table = offsets if offsets.ndim == 2 else offsets.expand(b, -1)
    return [
        (i, j, segments[i, j].tolist(), tokens[i, j].tolist(), table[i].tolist(), budget)
        for i in range(b)
        for j in range(h)
    ]


@given(cases())
def test_equals_filling_segment_by_segment(case: tuple[Tensor, Tensor, Tensor, int]) -> None:
    got = kp.top_segments(*case)
    assert got.dtype == torch.int64
    for i, j, *row in rows_of(case):
        assert got[i, j].tolist() == slow(*row)


@given(cases())
def test_at_most_one_segment_is_cut(case: tuple[Tensor, Tensor, Tensor, int]) -> None:
    got = kp.top_segments(*case)
    for i, j, _, tokens, offsets, budget in rows_of(case):
        kept = set(got[i, j].tolist()) - {-1}
        partial = 0
        for a, b in itertools.pairwise(offsets):
            members = {t for t in range(a, b) if tokens[t] > -math.inf}
            partial += bool(members & kept) and not members <= kept
        assert partial <= (len(kept) == budget)


@given(cases())
def test_unchecked_gives_the_same(case: tuple[Tensor, Tensor, Tensor, int]) -> None:
    assert torch.equal(kp.top_segments(*case, check=False), kp.top_segments(*case))


@given(cases(batched=True))
def test_a_row_equals_that_row_alone(case: tuple[Tensor, Tensor, Tensor, int]) -> None:
    segments, tokens, offsets, budget = case
    got = kp.top_segments(*case)
    for i in range(len(tokens)):
        n = tokens.shape[-1]
        own = offsets[i][: int((offsets[i] < n).sum()) + 1]
        part = segments[i : i + 1, :, : len(own) - 1]
        alone = kp.top_segments(part, tokens[i : i + 1], own, budget)
        assert torch.equal(alone[0], got[i])


@given(cases(), st.lists(st.integers(0, 17), min_size=2, max_size=2))
def test_a_budget_for_each_row_equals_the_rows_one_by_one(
    case: tuple[Tensor, Tensor, Tensor, int], budgets: list[int]
) -> None:
    segments, tokens, offsets, _ = case
    budgets = budgets[: len(tokens)]
    got = kp.top_segments(segments, tokens, offsets, budgets)
    for i, budget in enumerate(budgets):
        cut = offsets[i : i + 1] if offsets.ndim == 2 else offsets
        alone = kp.top_segments(segments[i : i + 1], tokens[i : i + 1], cut, budget)
        wider = torch.nn.functional.pad(alone, (0, got.shape[2] - alone.shape[2]), value=-1)
        assert torch.equal(got[i : i + 1], wider)


@given(cases())
def test_one_token_per_segment_is_top_tokens(case: tuple[Tensor, Tensor, Tensor, int]) -> None:
    _, tokens, _, budget = case
    offsets = torch.arange(tokens.shape[-1] + 1)
    got = kp.top_segments(tokens, tokens, offsets, budget)
    assert torch.equal(got, kp.top_tokens(tokens, budget))


def test_example() -> None:
    segments = torch.tensor([[[0.1, 0.9, 0.5]]])
    tokens = torch.tensor([[[1.0, 2, 3, 4, 5, 6, 7]]])
    offsets = torch.tensor([0, 2, 4, 7])
    assert kp.top_segments(segments, tokens, offsets, 4).tolist() == [[[2, 3, 5, 6]]]


class NoSync(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails on operations for which the host must read a result from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            raise AssertionError(f"{name} waits for the device")
        if name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        ):
            raise AssertionError("boolean indexing waits for the device")
        return func(*args, **(kwargs or {}))


def test_a_decode_step_never_waits_for_the_device() -> None:
    segments, tokens = torch.randn(2, 2, 3), torch.randn(2, 2, 6)
    offsets = torch.tensor([0, 2, 4, 6])
    with NoSync():
        kp.top_segments(segments, tokens, offsets, 3, check=False)
        kp.top_segments(segments, tokens, offsets.expand(2, -1), [3, 2], check=False)
        kp.top_tokens(tokens, 3, protected=kp.keep_window(6, 2), check=False)
        kp.stream_window(6, 3, starts=torch.tensor([0, 2]), check=False)
        kp.expand_spans(segments, 0.1, offsets, 3, n=6, kv_heads=1, check=False)
        with pytest.raises(AssertionError, match="waits for the device"):
            kp.top_tokens(tokens, 3)


segments, tokens, offsets = torch.zeros(1, 1, 2), torch.zeros(1, 1, 4), torch.tensor([0, 2, 4])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((segments, tokens, torch.tensor([0, 2, 3]), 1), ValueError, r"offsets .* end at 4 .*3\]"),
        ((segments, tokens, torch.tensor([0, 4, 4]), 1), ValueError, "strictly increasing, got"),
        ((segments, tokens, torch.tensor([1, 2, 4]), 1), ValueError, r"start at 0.*\[1, 2, 4\]"),
        (
            (segments, tokens, torch.tensor([[0, 0, 4]]), 1),
            ValueError,
            r"repeats of 4 at the end of a row aside, got \[\[0, 0, 4\]\]",
        ),
        ((segments, tokens, offsets.expand(2, 3), 1), ValueError, r"one row for each of the 1"),
        ((segments, tokens, offsets.int(), 1), TypeError, "offsets must be torch.int64"),
        ((segments, tokens, [0, 2, 4], 1), TypeError, "offsets must be a torch.Tensor, got list"),
        ((segments, tokens, offsets[None, None], 1), ValueError, r"got \[1, 1, 3\]"),
        ((segments, tokens, offsets.to("meta"), 1), ValueError, "device of token_scores, cpu"),
        (
            (segments.to("meta"), tokens, offsets, 1),
            ValueError,
            "segment_scores, meta, got cpu",
        ),
        ((segments[..., :1], tokens, offsets, 1), ValueError, r"segment_scores .*got \[1, 1, 1\]"),
        ((segments / 0, tokens, offsets, 1), ValueError, "segment_scores .*got nan"),
        ((segments, tokens / 0, offsets, 1), ValueError, "token_scores .*got nan"),
        ((segments, tokens, offsets, -1), ValueError, "budget must be at least 0, got -1"),
        ((segments, tokens, offsets, [-1]), ValueError, "budget must be at least 0, got -1"),
        ((segments, tokens, offsets, [1, 2]), ValueError, r"each of the 1 rows, got \[1, 2\]"),
    ],
)
def test_refuses(args: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kp.top_segments(*args)
