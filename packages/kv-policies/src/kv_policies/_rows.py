"""Rows of a cache, gathered a few at a time: never a copy of the whole."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Keys [B, H, T, D] of any strides as one table of rows, which is a view."""

    table: Tensor  # [rows, D]
    steps: tuple[int, int, int]  # how many rows the next batch entry, head, token is away

    def numbers(self, row: Tensor, at: Tensor, heads: int) -> Tensor:
        """int64[C, H, W]: where the tokens `at` [C, W] of batch entries `row` [C] lie."""
        batch, head, token = self.steps
        of_head = torch.arange(heads, device=at.device) * head
        return (row * batch)[:, None, None] + of_head[:, None] + (at * token)[:, None]

    def take(self, numbers: Tensor) -> Tensor:
        """float32[..., D]: the keys with these numbers."""
        return self.table.index_select(0, numbers.reshape(-1)).float().view(*numbers.shape, -1)


def rows(keys: Tensor) -> Rows:
    """The table for `keys`, none of whose first three sizes is 0."""
    *strides, inner = keys.stride()
    sizes = keys.shape[:3]
    step = math.gcd(*(s for s, n in zip(strides, sizes, strict=True) if n > 1)) or 1
    last = sum(s // step * (n - 1) for s, n in zip(strides, sizes, strict=True))
    table = keys.detach().as_strided((last + 1, keys.shape[3]), (step, inner))
    batch, head, token = (s // step for s in strides)
    return Rows(table, (batch, head, token))
