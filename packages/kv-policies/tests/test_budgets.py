from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kv_policies as kp

few_values = st.one_of(st.integers(0, 3).map(float), st.just(-math.inf), st.floats(0, 1, width=32))


@st.composite
def pyramids(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 40))
    minimum = draw(st.integers(0, 8))
    capacity = draw(st.one_of(st.none(), st.integers(minimum, 200)))
    most = layers * (200 if capacity is None else capacity)
    return {
        "total": draw(st.integers(layers * minimum, most)),
        "layers": layers,
        "beta": draw(st.floats(1, 50)),
        "minimum": minimum,
        "capacity": capacity,
    }


@given(pyramids())
def test_layers_sum_to_the_total_and_never_rise(options: dict[str, Any]) -> None:
    budgets = kp.pyramid_budgets(**options)
    assert sum(budgets) == options["total"]
    assert len(budgets) == options["layers"]
    assert budgets == sorted(budgets, reverse=True)
    assert min(budgets) >= options["minimum"]
    assert options["capacity"] is None or max(budgets) <= options["capacity"]


@given(st.integers(0, 5000), st.integers(2, 40), st.floats(1, 50))
def test_layers_lie_on_a_line(total: int, layers: int, beta: float) -> None:
    budgets = kp.pyramid_budgets(total, layers, beta=beta)
    last = total / layers / beta
    first = 2 * total / layers - last
    for i, k in enumerate(budgets):
        assert abs(k - (first + (last - first) * i / (layers - 1))) <= 1 + 1e-6


@given(st.integers(0, 500), st.integers(1, 20))
def test_beta_one_is_even(total: int, layers: int) -> None:
    budgets = kp.pyramid_budgets(total, layers, beta=1.0)
    assert max(budgets) - min(budgets) <= 1


@st.composite
def head_cases(draw: st.DrawFn) -> tuple[Tensor, int, float]:
    b, h, n = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(0, 10))
    flat = draw(st.lists(few_values, min_size=b * h * n, max_size=b * h * n))
    scores = torch.tensor(flat).view(b, h, n)
    return scores, draw(st.integers(0, h * n)), draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))


@given(head_cases())
def test_heads_sum_to_the_total_exactly(case: tuple[Tensor, int, float]) -> None:
    scores, total, floor = case
    budgets = kp.head_budgets(scores, total, floor=floor)
    available = (scores > -math.inf).sum(-1)
    assert budgets.dtype == torch.int64
    assert (budgets <= available).all()
    assert budgets.sum(-1).tolist() == available.sum(-1).clamp(max=total).tolist()


@given(head_cases())
def test_every_head_gets_its_floor(case: tuple[Tensor, int, float]) -> None:
    scores, total, floor = case
    h = scores.shape[1]
    least = torch.minimum((scores > -math.inf).sum(-1), torch.tensor(math.floor(floor * total / h)))
    assert (kp.head_budgets(scores, total, floor=floor) >= least).all()


@given(head_cases())
def test_heads_equal_a_sort_of_all_tokens(case: tuple[Tensor, int, float]) -> None:
    scores, total, floor = case
    h, n = scores.shape[1:]
    for row, got in zip(scores, kp.head_budgets(scores, total, floor=floor), strict=True):
        values = row.tolist()
        safe = set()
        for head in range(h):
            ranked = sorted(range(n), key=lambda t: (-values[head][t], t))
            safe |= {(head, t) for t in ranked[: math.floor(floor * total / h)]}
        pairs = [(i, t) for i in range(h) for t in range(n) if values[i][t] > -math.inf]
        pairs.sort(key=lambda p: (p not in safe, -values[p[0]][p[1]], p))
        expected = [sum(p[0] == i for p in pairs[:total]) for i in range(h)]
        assert got.tolist() == expected


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kp.pyramid_budgets(-1, 2), ValueError, "total must be at least 0, got -1"),
        (lambda: kp.pyramid_budgets(4, 0), ValueError, "layers must be at least 1, got 0"),
        (lambda: kp.pyramid_budgets(4, 2, beta=0.5), ValueError, "beta .*1e.12.*got 0.5"),
        (lambda: kp.pyramid_budgets(4, 2, beta=math.nan), ValueError, "beta .* got nan"),
        (lambda: kp.pyramid_budgets(4, 2, beta="2"), TypeError, "beta must be a number, got '2'"),
        (lambda: kp.pyramid_budgets(4, 2, minimum=3), ValueError, "at least .* = 6, got 4"),
        (lambda: kp.pyramid_budgets(4, 2, capacity=1), ValueError, "at most .* = 2, got 4"),
        (lambda: kp.head_budgets(torch.zeros(1, 2, 3), 7), ValueError, r"H \* N = 6, got 7"),
        (lambda: kp.head_budgets(torch.zeros(1, 2, 3), -1), ValueError, "total .* got -1"),
        (
            lambda: kp.head_budgets(torch.zeros(1, 2, 3), 3, floor=1.5),
            ValueError,
            r"floor .*\[0, 1\], got 1.5",
        ),
        (lambda: kp.head_budgets(torch.zeros(1, 2, 3) / 0, 3), ValueError, "scores .* got nan"),
    ],
)
def test_refuses(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_no_heads_and_no_tokens() -> None:
    assert kp.head_budgets(torch.zeros(2, 0, 3), 0).shape == (2, 0)
    assert kp.head_budgets(torch.zeros(1, 2, 0), 0).tolist() == [[0, 0]]
