"""Flash decoding: keys split over programs, the G*Q query rows of a KV head in one of them.

Stage one streams a split's keys and values once and leaves (out, lse) per row in a float32
workspace, or in the result itself when there is one split. Stage two merges the splits. Groups of
more than MAX_ROWS query rows take several programs, neighbours in launch order, so that the second
one finds keys and values in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from .online import absorb, dot, finish, place, query_rows


@tune(["D", "DV", "ROWS", "HAS_INDICES", "tuned_for"])
@triton.jit(
    do_not_specialize=["n", "n_keys", "split_size", "tuned_for", "s_b", "s_h", "i_b", "i_h"]
)
def _split_kernel(  # type: ignore[no-untyped-def]
    q,  # [B, Hq, Q, D], by strides
    k,
    v,
    log_size,
    lengths,
    starts,  # where each list begins, when all lie in one
    indices,
    out,  # [splits, B*Hkv, R, DV], R = G*Q
    lse,  # [splits, B*Hkv, R]
    scale,
    n,  # entries in the list: keys, or indices when there are some
    n_keys,
    split_size,
    tuned_for,
    heads,
    q_b,
    q_h,
    q_j,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    s_b,
    s_h,
    i_b,
    i_h,
    Q: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LOG_SIZE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    part, rows = place(R, ROWS)
    row_head = tl.program_id(1).to(tl.int64)
    b = row_head // heads
    h = row_head % heads
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)

    length = n
    poisoned = False
    if HAS_LENGTHS:
        length = tl.load(lengths + row_head)
        poisoned = (length > n) | (length < 0)
        length = tl.minimum(length, n)
    if HAS_STARTS:
        first = tl.load(starts + row_head)
        poisoned = poisoned | (first < 0) | (first + length > n_keys)
        length = tl.where(poisoned, 0, length)

    at_q = query_rows(q, b, h, rows, q_b, q_h, q_j, Q, R)
    queries = tl.load(
        at_q[:, None] + d[None, :], mask=(rows[:, None] < R) & (d[None, :] < D), other=0.0
    )
    last = length - Q + rows % Q  # the last entry a row sees when causal
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    outside = tl.zeros([BLOCK_N], tl.int32)

    start = part * split_size
    for i in range(start, tl.minimum(start + split_size, length), BLOCK_N):
        entry = i + tl.arange(0, BLOCK_N)
        valid = entry < tl.minimum(start + split_size, length)
        at = entry.to(tl.int64)
        if HAS_STARTS:
            at += first
        if HAS_INDICES:
            at = tl.load(indices + b * i_b + h * i_h + entry, mask=valid, other=-1)
            outside = outside | ((at >= n_keys) | (at < -1)).to(tl.int32)
            valid = valid & (at >= 0) & (at < n_keys)
        keys = tl.load(
            k + b * k_b + h * k_h + at[None, :] * k_n + d[:, None],
            mask=valid[None, :] & (d[:, None] < D),
            other=0.0,
        )
        s = dot(queries, keys, PRECISION) * scale
        if HAS_LOG_SIZE:
            size = tl.load(log_size + b * s_b + h * s_h + at, mask=valid, other=0.0)
            s += size[None, :]
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (entry[None, :] <= last[:, None])
        s = tl.where(seen, s, -float("inf"))
        values = tl.load(
            v + b * v_b + h * v_h + at[:, None] * v_n + dv[None, :],
            mask=valid[:, None] & (dv[None, :] < DV),
            other=0.0,
        )
        peak, total, acc = absorb(s, values, peak, total, acc, PRECISION)
    if HAS_INDICES:
        poisoned = tl.max(outside, 0) > 0
    finish(out, lse, peak, total, acc, poisoned, part, row_head, rows, R, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["splits", "rows"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    part_out,
    part_lse,
    out,
    lse,
    splits,
    rows,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row: lse = log sum exp(lse_i), out = sum exp(lse_i - lse) out_i."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV)
    s = tl.arange(0, BLOCK_S)
    states = tl.load(part_lse + s * rows + row, mask=s < splits, other=-float("inf"))
    peak = tl.max(states, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp(states - peak), 0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for i in range(0, splits, TILE):
        some = i + tl.arange(0, TILE)
        state = tl.load(part_lse + some * rows + row, mask=some < splits, other=-float("inf"))
        weights = tl.exp(state - peak)
        parts = tl.load(
            part_out + (some.to(tl.int64)[:, None] * rows + row) * DV + dv[None, :],
            # the zeros of empty splits are not read; weights of a poisoned one are NaN
            mask=(weights != 0.0)[:, None] & (dv[None, :] < DV),
            other=0.0,
        )
        acc += tl.sum(parts * weights[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    state = tl.where(total == 0.0, -float("inf"), peak + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(lse + row, state)
    tl.store(out + row * DV + dv, acc.to(out.dtype.element_ty), mask=dv < DV)


@on_device
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_size: Tensor | None,
    lengths: Tensor | None,
    indices: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `kv_attn_triton.attention` and, with `indices`, `selected_attention`."""
    return _attend(q, k, v, log_size, lengths, None, indices, causal, scale)


@on_device
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    log_size: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `kv_attn_triton.ragged_attention`: every head sees all entries, and a part of them."""
    heads = starts.shape
    k, v = k.expand(*heads, *k.shape), v.expand(*heads, *v.shape)
    log_size = None if log_size is None else log_size.expand(*heads, -1)
    return _attend(q, k, v, log_size, lengths, starts, None, False, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_size: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    indices: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, query_heads, queries, size = q.shape
    heads, n_keys, value_size = k.shape[1], k.shape[2], v.shape[3]
    n = n_keys if indices is None else indices.shape[2]
    rows = query_heads // heads * queries
    out = q.new_empty(batch, query_heads, queries, value_size)
    lse = q.new_empty(batch, query_heads, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q = rows_last(q)
    lengths = None if lengths is None else lengths.contiguous()
    starts = None if starts is None else starts.contiguous()
    indices = None if indices is None else rows_last(indices)
    log_size = None if log_size is None else rows_last(log_size)
    block_rows = min(MAX_ROWS, power(rows))
    row_blocks = triton.cdiv(rows, block_rows)
    # packed lists are together about as long as the whole that each could fill
    lists = 1 if starts is not None else batch * heads
    splits, split_size = split(n, lists * row_blocks, q.device)

    def launch(into: Tensor, states: Tensor) -> None:
        _split_kernel[(splits * row_blocks, batch * heads)](
            q,
            k,
            v,
            log_size,
            lengths,
            starts,
            indices,
            into,
            states,
            scale,
            n,
            n_keys,
            split_size,
            bucket(split_size),
            heads,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *((0, 0) if log_size is None else log_size.stride()[:2]),
            *((0, 0) if indices is None else indices.stride()[:2]),
            Q=queries,
            R=rows,
            D=size,
            DV=value_size,
            ROWS=block_rows,
            BLOCK_D=power(size),
            BLOCK_DV=power(value_size),
            HAS_LOG_SIZE=log_size is not None,
            HAS_LENGTHS=lengths is not None,
            HAS_STARTS=starts is not None,
            HAS_INDICES=indices is not None,
            CAUSAL=causal and queries > 1,
            PRECISION=precision(q.dtype),
        )

    return run_splits(launch, splits, out, lse)


def run_splits(
    launch: Callable[[Tensor, Tensor], None], splits: int, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """`launch(out, lse)` fills [splits, rows, ...]; merged into out and lse unless there is one."""
    if splits == 1:
        launch(out, lse)
        return out, lse
    rows, value_size = lse.numel(), out.shape[-1]
    partial = workspace(splits * rows * (value_size + 1), out.device)
    part_lse, part_out = partial[: splits * rows], partial[splits * rows :]
    launch(part_out, part_lse)
    _merge_kernel[(rows,)](
        part_out,
        part_lse,
        out,
        lse,
        splits,
        rows,
        DV=value_size,
        BLOCK_DV=power(value_size),
        BLOCK_S=triton.next_power_of_2(splits),
        TILE=min(16, triton.next_power_of_2(splits)),
    )
    return out, lse
