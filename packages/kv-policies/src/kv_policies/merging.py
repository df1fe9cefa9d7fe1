"""One entry per cluster."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kv_policies import _check
from kv_policies._select import indices_of


class Merged(NamedTuple):
    """Entries of each row and head in the order of their seeds; padding comes last."""

    keys: Float[Tensor, "B H N D"]
    """Mean key of each cluster, 0 for padding."""
    values: Float[Tensor, "B H N E"]
    """Mean value of each cluster, 0 for padding."""
    log_size: Float[Tensor, "B H N"]
    """float32, log of the number of tokens, to be added to the logits; -inf for padding."""
    seeds: Int64[Tensor, "B H N"]
    """Position of each cluster's seed, ascending, -1 for padding."""


def merge(
    keys: Float[Tensor, "B H T D"],
    values: Float[Tensor, "B H T E"],
    seeds: Int64[Tensor, "B H T"],
    *,
    check: bool = True,
) -> Merged:
    """`k_c = mean of keys in c`, `v_c = mean of values in c`, `log_size_c = log |c|`.

    Means are taken in float32 (float64 for float64 input) and returned in the dtype given. A
    cluster of one token keeps its key and value bit for bit. N is the largest number of clusters
    of any row and head.

    Args:
        keys: [B, H, T, D].
        values: [B, H, T, E].
        seeds: int64[B, H, T] from `greedy_clusters`: position of the seed of each token's
            cluster; -1 leaves the token out.
        check: also check values.

    Raises:
        TypeError: wrong dtype.
        ValueError: shapes or devices that do not fit, a seed outside [-1, T) or one that is not
            its own seed.

    Source: SemantiCache, section 2.4, Eqs. 3 and 4.
    """
    _check.shape("keys", keys, (None, None, None, None), "[B, H, T, D]")
    b, h, t, _ = keys.shape
    _check.shape("values", values, (b, h, t, None), "[B, H, T, E]")
    _check.shape("seeds", seeds, (b, h, t), "[B, H, T]")
    _check.floating("keys", keys)
    _check.floating("values", values)
    _check.dtype("seeds", seeds, torch.int64)
    _check.same_device("values", values, "keys", keys)
    _check.same_device("seeds", seeds, "keys", keys)
    if check:
        _check.refuse("seeds", seeds, (seeds < -1) | (seeds >= t), f"in [-1, {t})")
        own = seeds.gather(-1, seeds.clamp(min=0)) if t else seeds
        _check.refuse("seeds", seeds, (seeds >= 0) & (own != seeds), "its own seed")

    is_seed = seeds == torch.arange(t, device=seeds.device)
    n = int(is_seed.sum(-1).max()) if is_seed.numel() else 0
    rank = is_seed.cumsum(-1) - 1
    slot = torch.where(seeds < 0, n, rank.gather(-1, seeds.clamp(min=0)))
    row = torch.arange(b * h, device=seeds.device).view(b, h, 1) * (n + 1)
    slot = (slot + row).reshape(-1)
    count = torch.bincount(slot, minlength=b * h * (n + 1)).view(b, h, n + 1, 1)
    merged_keys, merged_values = (
        _mean(x, slot, count)[:, :, :n].to(x.dtype) for x in (keys, values)
    )
    log_size = count[:, :, :n, 0].float().log()
    return Merged(merged_keys, merged_values, log_size, indices_of(is_seed, n))


def _mean(x: Tensor, slot: Tensor, count: Tensor) -> Tensor:
    """[B, H, N + 1, D]: mean of the rows of x that share a slot, 0 for none."""
    b, h, n, _ = count.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = x.new_zeros(b * h * n, x.shape[-1], dtype=wide)
    sums.index_add_(0, slot, x.reshape(-1, x.shape[-1]).to(wide))
    return sums.view(b, h, n, -1) / count.clamp(min=1)
