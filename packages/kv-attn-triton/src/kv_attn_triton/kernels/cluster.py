"""Greedy seed clustering: one program per chunk and KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, on_device, power, precision
from .online import dot


def tile(dtype: torch.dtype) -> int:
    """Tokens decided together; few in tests so that short chunks span tiles."""
    return 16 if INTERPRETED or dtype == torch.float32 else 32


@triton.jit
def _rows(keys, token, valid, k_n, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of a tile of tokens and one over their lengths, 1 for a zero key."""
    d = tl.arange(0, BLOCK_D)
    where = valid[:, None] & (d[None, :] < D)
    x = tl.load(keys + token[:, None] * k_n + d[None, :], mask=where, other=0.0)
    wide = x.to(tl.float32)
    length = tl.sqrt(tl.sum(wide * wide, 1))
    return x, 1.0 / tl.where(length > 0.0, length, 1.0)


@triton.jit
def _similar(a, a_inverse, b, b_inverse, theta, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """cos(a_i, b_j) > theta; rounding may lift equal keys above 1, which theta = 1 must forbid."""
    cosine = dot(a, tl.trans(b), PRECISION) * a_inverse[:, None] * b_inverse[None, :]
    return tl.minimum(cosine, 1.0) > theta


@triton.jit
def _cluster_kernel(  # type: ignore[no-untyped-def]
    keys,
    offsets,
    seeds,  # int64[B*Hkv, N]
    theta,
    n,
    heads,
    k_b,
    k_h,
    k_n,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk = tl.program_id(0)
    row_head = tl.program_id(1).to(tl.int64)
    keys += (row_head // heads) * k_b + (row_head % heads) * k_h
    seeds += row_head * n
    begin = tl.load(offsets + chunk)
    end = tl.load(offsets + chunk + 1)
    place = tl.arange(0, BLOCK)
    for t in range(begin, end, BLOCK):
        token = t + place
        mine, inverse = _rows(keys, token, token < end, k_n, D, BLOCK_D)
        owner = tl.full([BLOCK], 0, tl.int64) + n  # n: nobody's yet
        for e in range(begin, t, BLOCK):
            earlier = e + place
            seed = tl.load(seeds + earlier) == earlier
            theirs, over = _rows(keys, earlier, earlier < t, k_n, D, BLOCK_D)
            links = _similar(theirs, over, mine, inverse, theta, PRECISION) & seed[:, None]
            owner = tl.minimum(owner, tl.min(tl.where(links, earlier[:, None], n), 0))
        links = _similar(mine, inverse, mine, inverse, theta, PRECISION).to(tl.int32)
        for i in range(0, tl.minimum(BLOCK, end - t)):
            free = tl.sum(tl.where(place == i, (owner == n).to(tl.int32), 0), 0) > 0
            row = tl.sum(tl.where(place[:, None] == i, links, 0), 0) > 0
            taken = free & (owner == n) & ((place == i) | (row & (place > i)))
            owner = tl.where(taken, t + i, owner)
        tl.store(seeds + token, owner, mask=token < end)
        tl.debug_barrier()  # the next tile reads what other threads stored


@on_device
def cluster(keys: Tensor, offsets: Tensor, theta: float) -> Tensor:
    """See `kv_attn_triton.cluster`."""
    batch, heads, n, size = keys.shape
    seeds = torch.empty(batch, heads, n, dtype=torch.int64, device=keys.device)
    if seeds.numel() == 0:
        return seeds
    offsets = offsets.to(keys.device).contiguous()
    _cluster_kernel[(offsets.numel() - 1, batch * heads)](
        keys,
        offsets,
        seeds,
        theta,
        n,
        heads,
        *keys.stride()[:3],
        D=size,
        BLOCK_D=power(size),
        BLOCK=tile(keys.dtype),
        PRECISION=precision(keys.dtype),
    )
    return seeds
