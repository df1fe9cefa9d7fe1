"""Segment offsets, shared by all rows or one set per row, in one form."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_policies import _check


def rows(offsets: Tensor, like: Tensor, like_name: str, n: int, *, check: bool) -> Tensor:
    """`offsets` as int64[B or 1, S + 1], checked against `like` [B, ...] and its `n` tokens.

    Offsets of one row per batch entry may end in repeats of `n`: segments without a token.
    """
    if not isinstance(offsets, Tensor):
        raise TypeError(f"offsets must be a torch.Tensor, got {type(offsets).__name__}")
    _check.dtype("offsets", offsets, torch.int64)
    _check.same_device("offsets", offsets, like_name, like)
    batched = offsets.ndim == 2
    if offsets.ndim not in (1, 2) or offsets.shape[-1] == 0:
        raise ValueError(
            f"offsets must have shape [S + 1] or [B, S + 1], got {list(offsets.shape)}"
        )
    if batched and offsets.shape[0] != like.shape[0]:
        raise ValueError(
            f"offsets must have one row for each of the {like.shape[0]} rows of {like_name}, "
            f"got shape {list(offsets.shape)}"
        )
    table = offsets if batched else offsets[None]
    if check:
        _check_values(offsets, table, n, batched)
    return table


def _check_values(offsets: Tensor, table: Tensor, n: int, batched: bool) -> None:
    step = table[:, 1:] - table[:, :-1]
    low = (step < 0) | ((step == 0) & (table[:, 1:] != n)) if batched else step <= 0
    fine = (table[:, 0] == 0).all() & (table[:, -1] == n).all() & ~low.any()
    if not bool(fine):
        repeats = f", repeats of {n} at the end of a row aside" if batched else ""
        raise ValueError(
            f"offsets must start at 0, end at {n} and be strictly increasing{repeats}, "
            f"got {offsets.tolist()}"
        )


def segment_ids(table: Tensor, n: int) -> Tensor:
    """int64[B or 1, n]: the segment of each token."""
    starts = torch.zeros(table.shape[0], n + 1, dtype=torch.int64, device=table.device)
    starts.scatter_(1, table, 1)
    return starts[:, :n].cumsum(1) - 1
