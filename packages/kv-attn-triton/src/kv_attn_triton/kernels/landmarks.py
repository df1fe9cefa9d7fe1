"""The best landmarks of each KV head, in two launches.

The first reads the landmarks once and leaves their logits and, per split, the softmax sums. The
second is one program per KV head: it normalises, sums over queries, takes the maximum over the
group and finds the lowest chosen score by bisection on its bits, all in registers, and writes the
chosen indices in ascending order, without a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.columns import pick
from .columns import column_sums, row_states
from .launch import on_device, rows_last

# Landmarks that one program's registers hold: 256K tokens in chunks of 8. Longer lists are scored
# by one kernel, and torch.topk selects.
LIMIT = 1 << 15


@triton.jit(do_not_specialize=["n", "splits", "count", "m_b", "m_h"])
def _select_kernel(  # type: ignore[no-untyped-def]
    logits,  # [B*Hkv, R, n], R = G*Q
    states,  # [splits, B*Hkv, R]
    mask,  # uint8
    out,  # int64[B*Hkv, count]
    n,
    splits,
    count,
    heads,
    m_b,
    m_h,
    m_n,
    G: tl.constexpr,
    Q: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    open_ = entry < n
    if HAS_MASK:
        over = mask + (row_head // heads) * m_b + (row_head % heads) * m_h
        open_ = open_ & (tl.load(over + entry.to(tl.int64) * m_n, mask=open_, other=0) != 0)
    s = tl.arange(0, BLOCK_S)
    best = tl.zeros([BLOCK], tl.float32)
    for g in range(G):
        column = tl.zeros([BLOCK], tl.float32)
        for j in range(Q):
            row = row_head * (G * Q) + g * Q + j
            at = s.to(tl.int64) * (tl.num_programs(0) * G * Q) + row
            parts = tl.load(states + at, mask=s < splits, other=-float("inf"))
            peak = tl.max(parts, 0)
            peak = tl.where(peak == -float("inf"), 0.0, peak)
            total = tl.sum(tl.exp(parts - peak), 0)
            state = peak + tl.log(tl.where(total == 0.0, 1.0, total))
            x = tl.load(logits + row * n + entry, mask=open_, other=-float("inf"))
            column += tl.exp(x - state)
        best = tl.maximum(best, column)
    # scores are not negative: their bits, read as integers, are in the same order
    key = tl.where(open_, best.to(tl.int32, bitcast=True), -1)

    lowest = 0
    found = tl.sum((key >= 0).to(tl.int32), 0)
    bit = 30
    while (bit >= 0) & (found > count):
        trial = lowest + (1 << bit)
        above = tl.sum((key >= trial).to(tl.int32), 0)
        enough = above >= count
        lowest = tl.where(enough, trial, lowest)
        found = tl.where(enough, above, found)
        bit -= 1

    # at most `count` lie above `lowest`; the first of those that equal it fill up
    higher = key > lowest
    equal = key == lowest
    room = count - tl.sum(higher.to(tl.int32), 0)
    chosen = higher | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    taken = tl.sum(chosen.to(tl.int32), 0)
    out += row_head * count
    tl.store(out + tl.cumsum(chosen.to(tl.int32), 0) - 1, entry.to(tl.int64), mask=chosen)
    rest = tl.arange(0, BLOCK_OUT)
    none = tl.full([BLOCK_OUT], -1, tl.int64)
    tl.store(out + rest, none, mask=(rest >= taken) & (rest < count))


def warps(block: int) -> int:
    """16 or 32 scores in the registers of a thread."""
    return min(32, max(4, block // 1024))


@on_device
def landmark_topk(
    q: Tensor, landmarks: Tensor, count: int, mask: Tensor | None, scale: float
) -> Tensor:
    """See `kv_attn_triton.landmark_topk`."""
    batch, heads, n, _ = landmarks.shape
    queries = q.shape[2]
    if n > LIMIT or n * queries == 0:
        scores = column_sums(q, landmarks, mask, scale, False, n, "max")[:, :, 0]
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return pick(scores, count)
    out = torch.empty(batch, heads, count, dtype=torch.int64, device=q.device)
    if out.numel() == 0:
        return out
    bytes_ = None if mask is None else mask.view(torch.uint8)
    states, logits = row_states(rows_last(q), landmarks, bytes_, scale, False, keep=True)
    block = max(128, triton.next_power_of_2(n))
    _select_kernel[(batch * heads,)](
        logits,
        states,
        bytes_,
        out,
        n,
        states.shape[0],
        count,
        heads,
        *((0, 0, 0) if bytes_ is None else bytes_.stride()),
        G=q.shape[1] // heads,
        Q=queries,
        HAS_MASK=mask is not None,
        BLOCK=block,
        BLOCK_S=triton.next_power_of_2(states.shape[0]),
        BLOCK_OUT=triton.next_power_of_2(count),
        num_warps=warps(block),
    )
    return out
