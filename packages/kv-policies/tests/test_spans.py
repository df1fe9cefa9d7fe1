from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kv_policies as kp

# ties, zeros of both signs, and logits below zero
gate_values = st.one_of(
    st.sampled_from([0.1, 0.5, 0.9, 0.0, -0.0, -2.5, -math.inf]), st.floats(-1, 1, width=32)
)
Case = dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    b, kv, g, n = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), 0)
    n = draw(st.integers(0, 14))
    batched = draw(st.booleans())
    rows = []
    for _ in range(b if batched else 1):
        cuts = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
        rows.append([0, *cuts, n] if n else [0])
    width = max(map(len, rows))
    offsets = torch.tensor([r + [n] * (width - len(r)) for r in rows])
    size = b * kv * g * (width - 1)
    gates = torch.tensor(draw(st.lists(gate_values, min_size=size, max_size=size)))
    each = draw(st.lists(st.sampled_from([-3.0, 0.0, 0.3, 0.5]), min_size=kv * g, max_size=kv * g))
    return {
        "gates": gates.view(b, kv * g, width - 1),
        "threshold": torch.tensor(each) if draw(st.booleans()) else 0.3,
        "offsets": offsets if batched else offsets[0],
        "budget": draw(st.integers(0, 16)),
        "n": n,
        "kv_heads": kv,
    }


def slow(case: Case, row: int, head: int) -> list[int]:
    """Spans expanded by one row and KV head, one after the other."""
    gates: Tensor = case["gates"][row]
    group = len(gates) // case["kv_heads"]
    offsets = case["offsets"] if case["offsets"].ndim == 1 else case["offsets"][row]
    limits = case["threshold"]
    limits = limits.tolist() if isinstance(limits, Tensor) else [limits] * len(gates)
    wanted = {}
    for q in range(head * group, (head + 1) * group):
        for k, gate in enumerate(gates[q].tolist()):
            if gate > limits[q]:
                wanted[k] = max(gate, wanted.get(k, -math.inf))
    room, chosen = case["budget"], []
    for k in sorted(wanted, key=lambda k: (-wanted[k], k)):
        length = int(offsets[k + 1] - offsets[k])
        if length > room:
            break
        room -= length
        if length:
            chosen.append(k)
    return sorted(chosen)


@given(cases())
def test_equals_expanding_span_by_span(case: Case) -> None:
    got = kp.expand_spans(**case)
    b, h = got.expanded.shape[:2]
    for i in range(b):
        for j in range(h):
            assert got.expanded[i, j].nonzero()[:, 0].tolist() == slow(case, i, j)


@given(cases(), st.data())
def test_selected_spans_are_the_expanded_ones_best_first(case: Case, data: st.DataObject) -> None:
    gates, offsets, threshold = case["gates"], case["offsets"], case["threshold"]
    b, q = gates.shape[:2]
    if isinstance(threshold, Tensor) and data.draw(st.booleans()):
        threshold = threshold.expand(b, -1)
    budgets = [data.draw(st.integers(0, 16)) for _ in range(b)]
    budget = data.draw(st.sampled_from([budgets, budgets[0]]))
    got = kp.select_spans(gates, threshold, offsets.diff(dim=-1), budget, kv_heads=case["kv_heads"])
    most = 0
    for i in range(b):
        for j in range(case["kv_heads"]):
            own = case | {"budget": budget if isinstance(budget, int) else budget[i]}
            chosen = [k for k in got[i, j].tolist() if k >= 0]
            most = max(most, len(chosen))
            assert got[i, j].tolist() == chosen + [-1] * (got.shape[2] - len(chosen))
            sizes = offsets.expand(b, -1)[i].diff().tolist()
            assert sorted(k for k in chosen if sizes[k]) == slow(own, i, j)
            group = q // case["kv_heads"]
            heads = range(j * group, (j + 1) * group)
            limits = threshold.expand(b, -1)[i].tolist() if isinstance(threshold, Tensor) else None
            best = [
                max(
                    float(gates[i, h, k])
                    for h in heads
                    if gates[i, h, k] > (limits[h] if limits else threshold)
                )
                for k in chosen
            ]
            assert best == sorted(best, reverse=True)
    assert got.shape[2] == most
    bound = data.draw(st.integers(most, most + 3))
    spans = gates.shape[2]
    ended = kp.select_spans(
        gates, threshold, offsets.diff(dim=-1), budget, kv_heads=case["kv_heads"], most=bound
    )
    padding = (0, min(bound, spans) - most)
    assert torch.equal(ended, torch.nn.functional.pad(got, padding, value=-1))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cost": torch.ones(1, 4)}, TypeError, "cost must be torch.int64, got torch.float32"),
        ({"cost": torch.ones(3).long()}, ValueError, r"cost must have shape \[S\] or \[B, S\]"),
        ({"cost": -torch.ones(4).long()}, ValueError, "cost must be at least 0, got -1"),
        ({"budget": [1, 2]}, ValueError, r"one entry for each of the 1 rows, got \[1, 2\]"),
        ({"budget": -1}, ValueError, "budget must be at least 0, got -1"),
        ({"kv_heads": 3}, ValueError, "kv_heads must divide the 2 query heads of gates, got 3"),
        ({"most": -1}, ValueError, "most must be at least 0, got -1"),
        ({"threshold": torch.zeros(2, 2)}, ValueError, r"threshold must have shape \[B, H_q\]"),
    ],
)
def test_wrong_selections_are_refused(unchecked: None, options: Any, error: Any, text: str) -> None:
    case = {"threshold": 0.5, "cost": torch.ones(4).long(), "budget": 2, "kv_heads": 1}
    with pytest.raises(error, match=text):
        kp.select_spans(torch.zeros(1, 2, 4), **case | options)


@given(cases())
def test_indices_are_the_tokens_of_the_expanded_spans(case: Case) -> None:
    got = kp.expand_spans(**case)
    b, h = got.expanded.shape[:2]
    table = case["offsets"].expand(b, -1)
    assert got.indices.shape == (b, h, min(case["budget"], case["n"]))
    for i in range(b):
        for j in range(h):
            tokens = [
                t
                for k in got.expanded[i, j].nonzero()[:, 0].tolist()
                for t in range(int(table[i, k]), int(table[i, k + 1]))
            ]
            padding = [-1] * (got.indices.shape[2] - len(tokens))
            assert got.indices[i, j].tolist() == tokens + padding


@given(cases(), st.integers(0, 16))
def test_a_larger_budget_expands_more(case: Case, other: int) -> None:
    few, many = (
        kp.expand_spans(**{**case, "budget": b}).expanded for b in sorted((case["budget"], other))
    )
    assert not (few & ~many).any()


@given(cases())
def test_unchecked_gives_the_same(case: Case) -> None:
    for one, other in zip(
        kp.expand_spans(**case), kp.expand_spans(**case, check=False), strict=True
    ):
        assert torch.equal(one, other)


fine: Case = {
    "gates": torch.zeros(1, 4, 2),
    "threshold": 0.5,
    "offsets": torch.tensor([0, 2, 4]),
    "budget": 2,
    "n": 4,
    "kv_heads": 2,
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_heads": 3}, ValueError, "kv_heads must divide the 4 query heads of gates, got 3"),
        ({"kv_heads": 0}, ValueError, "kv_heads must be at least 1, got 0"),
        ({"budget": -1}, ValueError, "budget must be at least 0, got -1"),
        ({"n": 5}, ValueError, r"offsets must start at 0, end at 5 .*\[0, 2, 4\]"),
        ({"threshold": math.nan}, ValueError, "threshold .* got nan"),
        ({"threshold": torch.tensor([math.nan] * 4)}, ValueError, r"threshold .* got nan at \(0,"),
        ({"threshold": torch.zeros(2)}, ValueError, r"threshold .*\[H_q\] = \[4\], got \[2\]"),
        (
            {"offsets": torch.tensor([0, 3, 2, 4]), "gates": torch.zeros(1, 4, 3)},
            ValueError,
            "3, 2",
        ),
        ({"offsets": fine["offsets"].to("meta")}, ValueError, "offsets .* gates, cpu, got meta"),
        (
            {"threshold": torch.zeros(4, device="meta")},
            ValueError,
            "threshold must be on the device of gates, cpu, got meta",
        ),
        ({"threshold": torch.zeros(4).int()}, TypeError, "threshold must be floating point"),
        ({"gates": torch.zeros(1, 4, 2).int()}, TypeError, "gates must be floating point"),
        ({"gates": torch.zeros(4, 2)}, ValueError, r"gates .*\[B, H, N\].* got \[4, 2\]"),
        ({"n": -1}, ValueError, "n must be at least 0, got -1"),
        ({"gates": torch.zeros(1, 4, 2) * math.nan}, ValueError, "gates .* got nan"),
        ({"gates": torch.zeros(1, 4, 3)}, ValueError, r"gates .*\[1, 4, 2\], got \[1, 4, 3\]"),
    ],
)
def test_refuses(changes: Case, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kp.expand_spans(**{**fine, **changes})


def test_a_batch_without_rows_expands_nothing() -> None:
    cost = torch.ones(3, dtype=torch.int64)
    spans = kp.select_spans(torch.zeros(0, 2, 3), 0.5, cost, 4, kv_heads=1)
    assert spans.shape == (0, 1, 0)
