"""Softmax over keys summed over queries, keys streamed twice: row states, then column sums."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.columns import silence
from .launch import (
    MAX_ROWS,
    bucket,
    on_device,
    power,
    precision,
    rows_last,
    split,
    tune,
    workspace,
)
from .online import dot, place, query_rows

Kind = Literal["none", "sum", "max"]


@tune(["D", "ROWS", "KEEP", "tuned_for"])
@triton.jit(do_not_specialize=["n", "split_size", "tuned_for", "m_b", "m_h"])
def _state_kernel(  # type: ignore[no-untyped-def]
    q,  # [B, Hq, Q, D], by strides
    k,
    mask,  # uint8
    logits,  # [B*Hkv, R, n], R = G*Q, when KEEP
    lse,  # [splits, B*Hkv, R]
    scale,
    n,
    split_size,
    tuned_for,
    heads,
    q_b,
    q_h,
    q_j,
    k_b,
    k_h,
    k_n,
    m_b,
    m_h,
    m_n,
    Q: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """log sum_n exp(scale q.k_n) over one split of keys, for ROWS rows of one KV head."""
    part, rows = place(R, ROWS)
    row_head = tl.program_id(1).to(tl.int64)
    b = row_head // heads
    h = row_head % heads
    d = tl.arange(0, BLOCK_D)
    at_q = query_rows(q, b, h, rows, q_b, q_h, q_j, Q, R)
    queries = tl.load(
        at_q[:, None] + d[None, :], mask=(rows[:, None] < R) & (d[None, :] < D), other=0.0
    )
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    start = part * split_size
    stop = tl.minimum(start + split_size, n)
    for i in range(start, stop, BLOCK_N):
        entry = (i + tl.arange(0, BLOCK_N)).to(tl.int64)
        valid = entry < stop
        if HAS_MASK:
            valid = valid & (tl.load(mask + b * m_b + h * m_h + entry * m_n, valid, other=0) != 0)
        keys = tl.load(
            k + b * k_b + h * k_h + entry[None, :] * k_n + d[:, None],
            mask=valid[None, :] & (d[:, None] < D),
            other=0.0,
        )
        s = dot(queries, keys, PRECISION) * scale
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (entry[None, :] <= n - Q + rows[:, None] % Q)
        s = tl.where(seen, s, -float("inf"))
        if KEEP:
            tl.store(
                logits + (row_head * R + rows[:, None]) * n + entry[None, :],
                s,
                mask=(rows[:, None] < R) & (entry[None, :] < stop),
            )
        new_peak = tl.maximum(peak, tl.max(s, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(s - base[:, None]), 1)
        peak = new_peak
    state = tl.where(total == 0.0, -float("inf"), peak + tl.log(tl.where(total == 0.0, 1.0, total)))
    here = (part.to(tl.int64) * tl.num_programs(1) + row_head) * R + rows
    tl.store(lse + here, state, mask=rows < R)


@tune(["D", "BLOCK_Q", "tuned_for"])
@triton.jit(do_not_specialize=["n", "end", "tuned_for", "m_b", "m_h"])
def _column_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    mask,
    lse,  # [B*Hkv, R]
    out,  # [B*Hkv, G, end], or [B*Hkv, 1, end] when KIND folds the group
    scale,
    n,
    end,
    tuned_for,
    heads,
    q_b,
    q_h,
    q_j,
    k_b,
    k_h,
    k_n,
    m_b,
    m_h,
    m_n,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """sum over queries of exp(scale q.k_n - lse) for BLOCK_N keys of one KV head."""
    row_head = tl.program_id(1).to(tl.int64)
    b = row_head // heads
    h = row_head % heads
    d = tl.arange(0, BLOCK_D)
    entry = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = entry < end
    valid = inside
    if HAS_MASK:
        valid = valid & (tl.load(mask + b * m_b + h * m_h + entry * m_n, valid, other=0) != 0)
    keys = tl.load(
        k + b * k_b + h * k_h + entry[None, :] * k_n + d[:, None],
        mask=valid[None, :] & (d[:, None] < D),
        other=0.0,
    )
    folded = tl.zeros([BLOCK_N], tl.float32)
    for g in range(G):
        column = tl.zeros([BLOCK_N], tl.float32)
        for j in range(0, Q, BLOCK_Q):
            query = j + tl.arange(0, BLOCK_Q)
            rows = g * Q + query
            at_q = query_rows(q, b, h, rows, q_b, q_h, q_j, Q, G * Q)
            queries = tl.load(
                at_q[:, None] + d[None, :], mask=(query[:, None] < Q) & (d[None, :] < D), other=0.0
            )
            state = tl.load(lse + row_head * (G * Q) + rows, mask=query < Q, other=0.0)
            s = dot(queries, keys, PRECISION) * scale - state[:, None]
            seen = valid[None, :] & (query[:, None] < Q)
            if CAUSAL:
                seen = seen & (entry[None, :] <= n - Q + query[:, None])
            column += tl.sum(tl.where(seen, tl.exp(tl.where(seen, s, 0.0)), 0.0), 0)
        if KIND == "none":
            tl.store(out + (row_head * G + g) * end + entry, column, mask=inside)
        elif KIND == "sum":
            folded += column
        else:
            folded = tl.maximum(folded, column)
    if KIND != "none":
        tl.store(out + row_head * end + entry, folded, mask=inside)


def row_states(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """lse of every query row over each split of keys, [splits, B, H_kv, G*Q], in the workspace.

    keep: the scaled logits [B, H_kv, G*Q, N] too, -inf where a key is not seen.
    """
    batch, query_heads, queries, size = q.shape
    heads, n = k.shape[1], k.shape[2]
    rows = query_heads // heads * queries
    block_rows = min(MAX_ROWS, power(rows))
    row_blocks = triton.cdiv(rows, block_rows)
    splits, split_size = split(n, batch * heads * row_blocks, q.device)
    held = splits * batch * heads * rows
    buffer = workspace(held + (batch * heads * rows * n if keep else 0), q.device)
    logits = buffer[held:].view(batch, heads, rows, n) if keep else None
    _state_kernel[(splits * row_blocks, batch * heads)](
        q,
        k,
        mask,
        logits,
        buffer,
        scale,
        n,
        split_size,
        bucket(split_size),
        *_strides(q, k, mask),
        Q=queries,
        R=rows,
        D=size,
        ROWS=block_rows,
        BLOCK_D=power(size),
        HAS_MASK=mask is not None,
        CAUSAL=causal,
        KEEP=keep,
        PRECISION=precision(q.dtype),
    )
    return buffer[:held].view(splits, batch, heads, rows), logits


def _strides(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[int, ...]:
    """Number of KV heads, then the strides of q, k and mask."""
    over_mask = (0, 0, 0) if mask is None else mask.stride()
    return (k.shape[1], *q.stride()[:3], *k.stride()[:3], *over_mask)


@on_device
def column_sums(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    end: int,
    kind: Kind,
) -> Tensor:
    """As `reference.columns.column_sums`, the group folded by `kind`: [B, H_kv, G or 1, end]."""
    batch, query_heads, queries, size = q.shape
    heads, n = k.shape[1], k.shape[2]
    group = query_heads // heads
    shape = (batch, heads, group if kind == "none" else 1, end)
    if queries == 0:
        return q.new_zeros(shape, dtype=torch.float32)
    out = q.new_empty(shape, dtype=torch.float32)
    if out.numel() == 0:
        return out
    q = rows_last(q)
    bytes_ = None if mask is None else mask.view(torch.uint8)
    states, _ = row_states(q, k, bytes_, scale, causal, keep=False)
    own = torch.arange(n - queries, n, device=q.device).repeat(group) if causal else None
    lse = silence(states.logsumexp(0), mask, own)
    _column_kernel[lambda meta: (triton.cdiv(end, meta["BLOCK_N"]), batch * heads)](
        q,
        k,
        bytes_,
        lse,
        out,
        scale,
        n,
        end,
        bucket(n),
        *_strides(q, k, bytes_),
        Q=queries,
        G=group,
        D=size,
        BLOCK_Q=min(32, power(queries)),
        BLOCK_D=power(size),
        HAS_MASK=mask is not None,
        CAUSAL=causal,
        KIND=kind,
        PRECISION=precision(q.dtype),
    )
    return out
