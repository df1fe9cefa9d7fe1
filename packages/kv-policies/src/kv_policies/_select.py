"""From keys to a mask to indices, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SORTED = 512  # entries of a row up to which a sort is as fast as any choice


def top_mask(keys: Tensor, k: int | Sequence[int]) -> Tensor:
    """The `k` largest entries above -inf in each row of `keys` [..., N]; ties: the earlier one.

    `k` may differ along the first dimension: one int for each of its rows.
    """
    if not isinstance(k, int):
        return _top_mask_of_each(keys, k)
    k = min(k, keys.shape[-1])
    if k == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    least = keys.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return _from_least(keys, least, k)


def _top_mask_of_each(keys: Tensor, k: Sequence[int]) -> Tensor:
    """`top_mask` with `k[i]` entries in row i of the first dimension."""
    most = min(max(k, default=0), keys.shape[-1])
    if most == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    counts = per_row([min(each, most) for each in k], keys).expand(*keys.shape[:-1], 1)
    best = keys.topk(most, dim=-1).values
    least = best.gather(-1, (counts - 1).clamp(min=0)).masked_fill(counts == 0, math.inf)
    return _from_least(keys, least, counts) & (counts > 0)


def per_row(numbers: Sequence[int], like: Tensor) -> Tensor:
    """int64[B, 1, ...] with as many dimensions as `like`, filled without a copy from the host."""
    each = [torch.full((), k, dtype=torch.int64, device=like.device) for k in numbers]
    return torch.stack(each).view(-1, *[1] * (like.ndim - 1))


def one_or_per_row(numbers: Sequence[int], like: Tensor) -> int | Tensor:
    """The one number that all rows have, 0 if there is no row; else as `per_row`."""
    return max(numbers, default=0) if len(set(numbers)) <= 1 else per_row(numbers, like)


def _from_least(keys: Tensor, least: Tensor, k: int | Tensor) -> Tensor:
    """The k entries of each row from its k-th largest, `least`, upwards."""
    above = keys > least
    level = (keys == least) & (keys > -math.inf)
    missing = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (level & (level.cumsum(-1, dtype=torch.int32) <= missing))


def best_first(keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest entries of each row of `keys` [..., N] and their positions, in falling order.

    Of equal ones the earlier is the larger, as in a stable sort, which takes many times as long
    where k is a small part of a long row.
    """
    n = keys.shape[-1]
    if k >= n or n <= SORTED or keys.dtype != torch.float32:
        best, order = keys.sort(dim=-1, descending=True, stable=True)
        return best[..., :k], order[..., :k]
    # integers in the order of the floats, each with room for the position below it
    bits = (keys + 0.0).view(torch.int32)  # -0.0 is 0.0
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    order = (rising - torch.arange(n, device=keys.device)).topk(k, dim=-1).indices
    return keys.gather(-1, order), order


def indices_of(mask: Tensor, size: int) -> Tensor:
    """Positions of the set entries, ascending, then -1: int64[..., size].

    No row of `mask` [..., N] may have more than `size` of them.
    """
    n = mask.shape[-1]
    slot = torch.where(mask, mask.cumsum(-1) - 1, size)
    indices = torch.full((*mask.shape[:-1], size + 1), -1, dtype=torch.int64, device=mask.device)
    indices.scatter_(-1, slot, torch.arange(n, device=mask.device).expand_as(slot))
    return indices[..., :size].contiguous()
