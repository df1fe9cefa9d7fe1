"""Grouped-query heads: packing queries under their KV head, and reducing over heads."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

Reduce: TypeAlias = Literal["none", "kv_head", "layer"]
REDUCTIONS = ("none", "kv_head", "layer")


def pack(queries: Tensor, kv_heads: int) -> Tensor:
    """[B, H_q, Q, D] -> float32[B, H_kv, G*Q, D]; row g*Q + n is query n of the group's head g."""
    batch, heads, count, size = queries.shape
    return queries.float().reshape(batch, kv_heads, heads // kv_heads * count, size)


def reduced_heads(heads: int, kv_heads: int, reduce: Reduce) -> int:
    """How many heads are left after `reduce`."""
    return {"none": heads, "kv_head": kv_heads, "layer": 1}[reduce]


def reduce_groups(grouped: Tensor, reduce: Reduce) -> Tensor:
    """[B, H_kv, G, N] -> [B, H, N]: every head, the mean of each group, or the mean of all."""
    if reduce == "none":
        return grouped.flatten(1, 2)
    if reduce == "kv_head":
        return grouped.mean(2)
    return grouped.flatten(1, 2).mean(1, keepdim=True)
