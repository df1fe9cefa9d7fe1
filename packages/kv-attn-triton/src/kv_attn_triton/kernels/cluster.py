"""Greedy seed clustering: one program per chunk and KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, power

BLOCK = 16 if INTERPRETED else 32  # small in tests so that short chunks span blocks


@triton.jit
def _unit(keys, token, valid, k_n, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, BLOCK_D)
    where = valid[:, None] & (d[None, :] < D)
    x = tl.load(keys + token[:, None] * k_n + d[None, :], mask=where, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(x * x, 1))
    return x / tl.where(length > 0.0, length, 1.0)[:, None]


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
        mine = _unit(keys, token, token < end, k_n, D, BLOCK_D)
        owner = tl.full([BLOCK], 0, tl.int64) + n  # n: nobody's yet
        for e in range(begin, t, BLOCK):
            earlier = e + place
            seed = tl.load(seeds + earlier) == earlier
            theirs = _unit(keys, earlier, earlier < t, k_n, D, BLOCK_D)
            cosine = tl.dot(theirs, tl.trans(mine), input_precision="ieee")
            links = (tl.minimum(cosine, 1.0) > theta) & seed[:, None]
            owner = tl.minimum(owner, tl.min(tl.where(links, earlier[:, None], n), 0))
        cosine = tl.dot(mine, tl.trans(mine), input_precision="ieee")
        links = (tl.minimum(cosine, 1.0) > theta).to(tl.int32)
        for i in range(0, tl.minimum(BLOCK, end - t)):
            free = tl.sum(tl.where(place == i, (owner == n).to(tl.int32), 0), 0) > 0
            row = tl.sum(tl.where(place[:, None] == i, links, 0), 0) > 0
            taken = free & (owner == n) & ((place == i) | (row & (place > i)))
            owner = tl.where(taken, t + i, owner)
        tl.store(seeds + token, owner, mask=token < end)
        tl.debug_barrier()  # the next tile reads what other threads stored


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
        BLOCK=BLOCK,
    )
    return seeds
