"""SeKV's choice of the spans to expand."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kv_policies import _check, _offsets
from kv_policies._select import indices_of


class Expansion(NamedTuple):
    """What `expand_spans` chose."""

    expanded: Bool[Tensor, "B H S"]
    """Spans whose tokens are rebuilt; the others stay one coarse entry."""
    indices: Int64[Tensor, "B H K"]
    """Positions of the tokens of expanded spans, ascending, -1 padded, K = min(budget, n)."""


def expand_spans(
    gates: Float[Tensor, "B Hq S"],
    threshold: float | Float[Tensor, " Hq"],
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
        threshold: one number or float[H_q], one per query head.
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

    fired = score.masked_fill(score <= limit, -math.inf)
    best = fired.unflatten(1, (kv_heads, q // kv_heads)).amax(2)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    length = table.diff(dim=1)[:, None].expand_as(best)
    filled = length.gather(-1, order).cumsum(-1)
    fits = torch.empty_like(best, dtype=torch.bool).scatter_(-1, order, filled <= budget)
    expanded = fits & (best > -math.inf) & (length > 0)
    ids = _offsets.segment_ids(table, n)[:, None].expand(b, kv_heads, n)
    return Expansion(expanded, indices_of(expanded.gather(-1, ids), budget))


def _limit(threshold: float | Tensor, gates: Tensor, *, check: bool) -> float | Tensor:
    """`threshold` as a number or [H_q, 1]."""
    if not isinstance(threshold, Tensor):
        return _check.real("threshold", threshold, -math.inf, math.inf)
    _check.shape("threshold", threshold, (gates.shape[1],), "[H_q]")
    _check.floating("threshold", threshold)
    _check.same_device("threshold", threshold, "gates", gates)
    if check:
        _check.refuse("threshold", threshold, threshold.isnan(), "a number")
    return threshold[:, None]
