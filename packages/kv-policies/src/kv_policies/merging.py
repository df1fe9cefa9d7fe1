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
    log_size: Float[Tensor, "B H T"] | None = None,
    check: bool = True,
) -> Merged:
    """`k_c = mean of keys in c`, `v_c = mean of values in c`, `log_size_c = log |c|`.

    Entries that are merged already count as the tokens they stand for: with `w = exp(log_size)`,
    `k_c = sum w k / sum w`, `v_c = sum w v / sum w`, `log_size_c = log sum w`. Means are taken in
    float32 (float64 for float64 input) and returned in the dtype given. A cluster of one token
    keeps its key and value bit for bit. N is the largest number of clusters of any row and head.

    Args:
        keys: [B, H, T, D].
        values: [B, H, T, E].
        seeds: int64[B, H, T] from `greedy_clusters`: position of the seed of each token's
            cluster; -1 leaves the token out.
        log_size: float32[B, H, T], log of the tokens that each entry stands for; 0 for all when
            not given.
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

    if log_size is not None:
        _check.shape("log_size", log_size, (b, h, t), "[B, H, T]")
        _check.dtype("log_size", log_size, torch.float32)
        _check.same_device("log_size", log_size, "keys", keys)
        if check:
            _check.refuse("log_size", log_size, ~log_size.isfinite() & (seeds >= 0), "finite")

    is_seed = seeds == torch.arange(t, device=seeds.device)
    n = int(is_seed.sum(-1).max()) if is_seed.numel() else 0
    rank = is_seed.cumsum(-1) - 1
    slot = torch.where(seeds < 0, n, rank.gather(-1, seeds.clamp(min=0)))
    wide = torch.promote_types(keys.dtype, torch.float32)
    weight = torch.ones((), dtype=wide, device=keys.device).expand(b, h, t)
    if log_size is not None:
        weight = torch.where(seeds < 0, 1.0, log_size.to(wide)).exp()
    total = keys.new_zeros(b, h, n + 1, dtype=wide).scatter_add_(2, slot, weight)
    # 1 for a cluster of one, which therefore stays bit for bit what it was
    share = weight / total.gather(2, slot)
    row = torch.arange(b * h, device=seeds.device).view(b, h, 1) * (n + 1)
    where = (slot + row).reshape(-1)
    merged_keys, merged_values = (
        _sum(x, share, where, n + 1)[:, :, :n].to(x.dtype) for x in (keys, values)
    )
    return Merged(merged_keys, merged_values, total[:, :, :n].log().float(), indices_of(is_seed, n))


def _sum(x: Tensor, share: Tensor, where: Tensor, slots: int) -> Tensor:
    """[B, H, slots, D]: sum of the rows of x times their share, by slot."""
    b, h, _, d = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = x.new_zeros(b * h * slots, d, dtype=wide)
    # a contiguous copy, changed in place: a product would take the strides of x, and be copied
    part = x.to(wide, copy=True, memory_format=torch.contiguous_format).mul_(share[..., None])
    sums.index_add_(0, where, part.view(-1, d))
    return sums.view(b, h, slots, d)
