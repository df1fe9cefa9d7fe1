"""SeKV's choice of the spans to expand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kv_policies import _check, _offsets
from kv_policies._select import best_first, indices_of, one_or_per_row


class Expansion(NamedTuple):
    """What `expand_spans` chose."""

    expanded: Bool[Tensor, "B H S"]
    """Spans whose tokens are rebuilt; the others stay one coarse entry."""
    indices: Int64[Tensor, "B H K"]
    """Positions of the tokens of expanded spans, ascending, -1 padded, K = min(budget, n)."""


def expand_spans(
    gates: Float[Tensor, "B Hq S"],
    threshold: float | Float[Tensor, "*each Hq"],
    offsets: Int64[Tensor, "*rows S1"],
    budget: int,
    *,
    n: int,
    kv_heads: int,
    check: bool = True,
) -> Expansion:
    """A KV head expands the spans that any of its query heads fires for, best first, to `budget`.

    `a[h, k] = max over the query heads g of h with gates[g, k] > threshold[g]`; in falling order
    of a, spans are expanded as long as all their tokens fit in `budget`. The first one that does
    not fit ends it: no later, smaller span takes its place.

    Args:
        gates: [B, H_q, S], higher = first, such as SeKV's sigmoid; -inf (or any value not above
            the threshold) marks what is no span to expand, such as anchors.
        threshold: one number or float[H_q], one per query head, or float[B, H_q].
        offsets: int64[S + 1], or int64[B, S + 1] where rows differ (repeats of n at the end).
        budget: tokens that expanded spans may hold per row and KV head, at least 0.
        n: number of tokens, which the offsets cover.
        kv_heads: number of KV heads; query head h belongs to KV head h // (H_q // kv_heads).
        check: also check values, which makes the host wait for a GPU: pass False in a decode step.

    Raises:
        TypeError: wrong dtype.
        ValueError: shapes or devices that do not fit, negative budget, `kv_heads` that does not
            divide H_q, NaN or +inf in `gates`, NaN in `threshold`, offsets out of order.

    Source: SeKV, section 3.3, Eq. 9, and section 4.1 (the cap by decreasing relevance).
    """
    score = _check.scores("gates", gates, check=check)
    budget = _check.integer("budget", budget, least=0)
    kv_heads = _check.integer("kv_heads", kv_heads, least=1)
    b, q = score.shape[:2]
    if q % kv_heads:
        raise ValueError(f"kv_heads must divide the {q} query heads of gates, got {kv_heads}")
    limit = _limit(threshold, score, check=check)
    n = _check.integer("n", n, least=0)
    budget = min(budget, n)
    table = _offsets.rows(offsets, score, "gates", n, check=check)
    _check.shape("gates", score, (b, q, table.shape[1] - 1), "[B, H_q, S]")

    length = table.diff(dim=1)
    order, fits = _in_order(score, limit, length, budget, kv_heads, length.shape[1])
    expanded = torch.empty_like(fits).scatter_(-1, order, fits)
    expanded &= (length > 0)[:, None]
    ids = _offsets.segment_ids(table, n)[:, None].expand(b, kv_heads, n)
    return Expansion(expanded, indices_of(expanded.gather(-1, ids), budget))


def select_spans(
    gates: Float[Tensor, "B Hq S"],
    threshold: float | Float[Tensor, "*each Hq"],
    cost: Int64[Tensor, "*rows S"],
    budget: int | Sequence[int],
    *,
    kv_heads: int,
    most: int | None = None,
    check: bool = True,
) -> Int64[Tensor, "B Hkv E"]:
    """The choice of `expand_spans` where spans lie apart and rows differ: spans, best first.

    As there, span k of a KV head is a candidate when the gate of any of its query heads is above
    that head's threshold; candidates are taken in falling order of their highest such gate until
    one costs more than what is left of the budget. Any increasing function of the gates and
    thresholds gives the same, so logits can stand for sigmoids.

    Args:
        gates: [B, H_q, S], -inf where there is no span.
        threshold: one number, or float[H_q], or float[B, H_q].
        cost: what expanding a span takes, int64[S] or int64[B, S], at least 0: its tokens, or one
            less where they replace an entry.
        budget: what a row and KV head may spend, at least 0; or one such int for each row.
        most: spans that a list can hold at most, where the caller knows of a bound below S: no
            others are put in order then, and the host waits for nothing. Lists end there.
        kv_heads, check: as in `expand_spans`.

    Returns:
        int64[B, H_kv, E], in falling order of the gate, of equal ones the earlier first, -1 padded.
        E is min(most, S), or without `most` what the longest list has, which the host reads.

    Raises:
        TypeError, ValueError: as `expand_spans`.

    Source: SeKV, section 3.3, Eq. 9, and section 4.1.
    """
    score = _check.scores("gates", gates, check=check)
    kv_heads = _check.integer("kv_heads", kv_heads, least=1)
    b, q, count = score.shape
    if q % kv_heads:
        raise ValueError(f"kv_heads must divide the {q} query heads of gates, got {kv_heads}")
    limit = _limit(threshold, score, check=check)
    _check.dtype("cost", cost, torch.int64)
    _check.shape("cost", cost.expand(b, -1), (b, count), "[S] or [B, S]")
    _check.same_device("cost", cost, "gates", gates)
    if check:
        _check.refuse("cost", cost, cost < 0, "at least 0")
    budgets = _check.budgets(budget, b)
    granted = one_or_per_row(budgets, score)
    bound = count if most is None else min(_check.integer("most", most, least=0), count)
    order, fits = _in_order(score, limit, cost.expand(b, -1), granted, kv_heads, bound)
    if most is None:
        bound = int(fits.sum(-1).max()) if fits.numel() else 0
    return order[..., :bound].masked_fill_(~fits[..., :bound], -1)


def _in_order(
    score: Tensor,
    limit: float | Tensor,
    cost: Tensor,
    budget: int | Tensor,
    kv_heads: int,
    most: int,
) -> tuple[Tensor, Tensor]:
    """The `most` spans [B, H_kv, K] of the best gates, in falling order, and which are taken, a
    prefix."""
    fired = score.masked_fill(score <= limit, -math.inf)
    best = fired.unflatten(1, (kv_heads, score.shape[1] // kv_heads)).amax(2)
    best, order = best_first(best, most)
    spent = cost[:, None].expand(len(score), kv_heads, -1).gather(-1, order).cumsum(-1)
    return order, (spent <= budget) & (best > -math.inf)


def _limit(threshold: float | Tensor, gates: Tensor, *, check: bool) -> float | Tensor:
    """`threshold` as a number or [H_q, 1] or [B, H_q, 1]."""
    if not isinstance(threshold, Tensor):
        return _check.real("threshold", threshold, -math.inf, math.inf)
    if threshold.ndim == 2:
        _check.shape("threshold", threshold, tuple(gates.shape[:2]), "[B, H_q]")
    else:
        _check.shape("threshold", threshold, (gates.shape[1],), "[H_q]")
    _check.floating("threshold", threshold)
    _check.same_device("threshold", threshold, "gates", gates)
    if check:
        _check.refuse("threshold", threshold, threshold.isnan(), "a number")
    return threshold[..., None]
