"""Heavy hitters of a prompt: the tokens that received most attention, beside the latest ones."""

from __future__ import annotations

import math

from torch import Tensor

from kv_integration.method import Row
from kv_policies import keep_window, top_tokens
from kv_score import accumulated_attention


def check_recent(recent: float) -> None:
    """Raise unless `recent` is a share of the budget in (0, 1]."""
    if not 0 < recent <= 1:
        raise ValueError(f"recent must be in (0, 1], got {recent}")


def accumulated(row: Row) -> Tensor:
    """Attention that each entry received from all queries given, float32[1, H_kv, T]."""
    if row.received is not None:
        return row.received
    return accumulated_attention(row.queries, row.keys, scale=row.scale, reduce="kv_head")


def heavy_hitters(row: Row, budget: int, recent: float) -> tuple[Tensor, Tensor]:
    """H2O's choice: `(indices, scores)`, int64[1, H_kv, budget] and float32[1, H_kv, T].

    The latest ceil(recent * budget) entries, and those to which all queries given paid most.
    """
    scores = accumulated(row)
    latest = keep_window(row.tokens, math.ceil(recent * budget), device=row.keys.device)
    return top_tokens(scores, budget, protected=latest), scores
