"""Methods that keep some tokens and forget the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kv_integration.entries import RowEntries
from kv_integration.kept import hold
from kv_integration.method import LayerState, Method, Plan, Row


class Eviction(Method):
    """A method that keeps some tokens of the prompt and forgets the rest."""

    recompresses = True

    @abstractmethod
    def keep(self, row: Row, plan: Plan) -> Tensor:
        """Entries to keep, int64[1, 1 or H_kv, K]: ascending, unique, the same K for every head."""

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return hold([self._kept(row, plan) for row in rows])

    def _kept(self, row: Row, plan: Plan) -> RowEntries:
        kept = self.keep(row, plan)
        keys, values = take(row.keys, kept), take(row.values, kept)
        return entries_at(row, kept, plan, keys=keys, values=values)


def entries_at(
    row: Row, indices: Tensor, plan: Plan, *, keys: Tensor, values: Tensor
) -> RowEntries:
    """Entries [1, H_kv, K, D] that stand where `indices` [1, 1 or H_kv, K] say."""
    positions = None
    if plan.recompress:
        positions = indices if row.positions is None else along(row.positions, indices)
    return RowEntries.equal(keys, values, positions)


def along(positions: Tensor, indices: Tensor) -> Tensor:
    """Positions [1, 1 or H, T] of the entries at indices [1, 1 or H, K]: [1, 1 or H, K]."""
    heads = max(positions.shape[1], indices.shape[1])
    return positions.expand(-1, heads, -1).gather(2, indices.expand(-1, heads, -1))


def everything(row: Row) -> Tensor:
    """Every entry, int64[1, 1, T]."""
    return torch.arange(row.tokens, device=row.keys.device)[None, None]


def with_latest(chosen: Tensor, row: Row, window: int) -> Tensor:
    """`chosen` [1, H, K] and after them the last `window` entries: [1, H, K + window]."""
    latest = everything(row)[..., row.tokens - window :].expand(-1, chosen.shape[1], -1)
    return torch.cat([chosen, latest], dim=-1)


def take(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x [1, H, T, D] at indices [1, 1 or H, K] -> [1, H, K, D]."""
    if indices.shape[1] == 1:
        return x.index_select(2, indices[0, 0])
    return x.gather(2, indices[..., None].expand(-1, -1, -1, x.shape[-1]))


def add_rows(sums: Tensor, indices: Tensor, rows: Tensor, weight: Tensor) -> None:
    """Add rows [1, H, T, D] times `weight` [1, H, T] to those of `sums` at `indices` [1, H, T].

    sums: float32[1, H, K, D], contiguous.
    """
    heads, count, size = sums.shape[1:]
    first = torch.arange(heads, device=sums.device)[:, None] * count
    # a contiguous copy, changed in place: a product would take the strides of the rows
    part = rows.to(sums.dtype, copy=True, memory_format=torch.contiguous_format)
    part.mul_(weight[..., None])
    sums.view(-1, size).index_add_(0, (indices + first).flatten(), part.view(-1, size))
