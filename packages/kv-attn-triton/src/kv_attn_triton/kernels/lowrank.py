"""Keys rebuilt from factors, rotated and attended without leaving the program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import run_splits
from .launch import bucket, power, precision, split, tune
from .online import absorb, dot, finish


@triton.jit
def _rebuild(  # type: ignore[no-untyped-def]
    left,  # row 0 of the batch's left factor
    right,  # row 0 of the head's right factor
    at,
    valid,
    column,
    l_n,
    r_r,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left[at] @ right[:, column] for the first WIDTH of the columns: float32[BLOCK_N, BLOCK_W]."""
    inside = tl.arange(0, BLOCK_W) < WIDTH
    keys = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    for i in range(0, RANK, BLOCK_RANK):
        rank = i + tl.arange(0, BLOCK_RANK)
        rows = tl.load(
            left + at[:, None] * l_n + rank[None, :],
            mask=valid[:, None] & (rank[None, :] < RANK),
            other=0.0,
        )
        basis = tl.load(
            right + rank[:, None] * r_r + column[None, :],
            mask=(rank[:, None] < RANK) & inside[None, :],
            other=0.0,
        )
        keys += dot(rows, basis, PRECISION)
    return keys.to(left.dtype.element_ty)


@triton.jit
def _table(x, at, valid, column, t_n, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = tl.arange(0, BLOCK_W) < WIDTH
    where = valid[:, None] & inside[None, :]
    return tl.load(x + at[:, None] * t_n + column[None, :], mask=where, other=0.0).to(tl.float32)


@triton.jit
def _query(q, rows, column, q_r, R: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = tl.arange(0, BLOCK_W) < WIDTH
    where = (rows[:, None] < R) & inside[None, :]
    return tl.load(q + rows[:, None].to(tl.int64) * q_r + column[None, :], mask=where, other=0.0)


@tune(["D", "DV", "RANK", "ROWS", "tuned_for"])
@triton.jit(do_not_specialize=["n", "n_keys", "split_size", "tuned_for"])
def _lowrank_kernel(  # type: ignore[no-untyped-def]
    q,
    left,
    right,
    v,
    indices,
    cos,
    sin,
    log_size,
    out,
    lse,
    scale,
    n,
    n_keys,
    split_size,
    tuned_for,
    heads,
    q_b,
    q_h,
    q_r,
    l_b,
    l_n,
    r_b,
    r_h,
    r_r,
    v_b,
    v_h,
    v_n,
    i_b,
    i_h,
    c_b,
    c_n,
    s_b,
    s_n,
    z_b,
    z_h,
    R: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,  # pairs of columns that turn
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATHERED: tl.constexpr,
    HAS_LOG_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    part = tl.program_id(0)
    row_head = tl.program_id(1).to(tl.int64)
    b = row_head // heads
    h = row_head % heads
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dv = tl.arange(0, BLOCK_DV)
    pair = tl.arange(0, BLOCK_HALF)
    first = pair * 2 if INTERLEAVED else pair
    second = pair * 2 + 1 if INTERLEAVED else pair + HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    REST: tl.constexpr = D - 2 * HALF

    query = q + b * q_b + h * q_h
    first_q = _query(query, rows, first, q_r, R, HALF, BLOCK_HALF)
    second_q = _query(query, rows, second, q_r, R, HALF, BLOCK_HALF)
    rest_q = _query(query, rows, rest, q_r, R, REST, BLOCK_REST)
    left_b = left + b * l_b
    right_h = right + b * r_b + h * r_h
    cos_b = cos + b * c_b
    sin_b = sin + b * s_b

    poisoned = False
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    start = part * split_size
    stop = tl.minimum(start + split_size, n)
    for i in range(start, stop, BLOCK_N):
        entry = i + tl.arange(0, BLOCK_N)
        at = tl.load(indices + b * i_b + h * i_h + entry, mask=entry < stop, other=-1)
        poisoned = poisoned | (tl.max((at >= n_keys).to(tl.int32) | (at < -1).to(tl.int32)) > 0)
        valid = (at >= 0) & (at < n_keys)
        s = tl.zeros([ROWS, BLOCK_N], tl.float32)
        if HALF > 0:
            x = _rebuild(
                left_b, right_h, at, valid, first, l_n, r_r,
                HALF, RANK, BLOCK_N, BLOCK_HALF, BLOCK_RANK, PRECISION,
            ).to(tl.float32)  # fmt: skip
            y = _rebuild(
                left_b, right_h, at, valid, second, l_n, r_r,
                HALF, RANK, BLOCK_N, BLOCK_HALF, BLOCK_RANK, PRECISION,
            ).to(tl.float32)  # fmt: skip
            turned = x * _table(cos_b, at, valid, first, c_n, HALF, BLOCK_HALF)
            turned -= y * _table(sin_b, at, valid, first, s_n, HALF, BLOCK_HALF)
            s += dot(first_q, tl.trans(turned.to(first_q.dtype)), PRECISION)
            turned = y * _table(cos_b, at, valid, second, c_n, HALF, BLOCK_HALF)
            turned += x * _table(sin_b, at, valid, second, s_n, HALF, BLOCK_HALF)
            s += dot(second_q, tl.trans(turned.to(first_q.dtype)), PRECISION)
        if REST > 0:
            x = _rebuild(
                left_b, right_h, at, valid, rest, l_n, r_r,
                REST, RANK, BLOCK_N, BLOCK_REST, BLOCK_RANK, PRECISION,
            )  # fmt: skip
            s += dot(rest_q, tl.trans(x), PRECISION)
        s = s * scale
        if HAS_LOG_SIZE:
            s += tl.load(log_size + b * z_b + h * z_h + at, mask=valid, other=0.0)[None, :]
        s = tl.where(valid[None, :], s, -float("inf"))
        where = entry.to(tl.int64) if GATHERED else at
        values = tl.load(
            v + b * v_b + h * v_h + where[:, None] * v_n + dv[None, :],
            mask=valid[:, None] & (dv[None, :] < DV),
            other=0.0,
        )
        peak, total, acc = absorb(s, values, peak, total, acc, PRECISION)
    finish(out, lse, peak, total, acc, poisoned, part, row_head, rows, R, DV, BLOCK_DV)


def lowrank_attention(
    q: Tensor,
    left: Tensor,
    right: Tensor,
    v: Tensor,
    indices: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    values_gathered: bool,
    log_size: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `kv_attn_triton.lowrank_attention`."""
    batch, query_heads, queries, size = q.shape
    heads, rank, value_size, turned = right.shape[1], right.shape[2], v.shape[3], cos.shape[2]
    n, rows = indices.shape[2], query_heads // heads * queries
    out = q.new_empty(batch, query_heads, queries, value_size)
    lse = q.new_empty(batch, query_heads, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    packed = q.reshape(batch, heads, rows, size)
    packed = packed if packed.stride(3) == 1 else packed.contiguous()
    indices, cos, sin = indices.contiguous(), cos.contiguous(), sin.contiguous()
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    if log_size is not None and log_size.stride(2) != 1:
        log_size = log_size.contiguous()
    block_rows = min(64, power(rows))
    row_blocks = triton.cdiv(rows, block_rows)
    splits, split_size = split(n, batch * heads * row_blocks, q.device)

    def launch(into: Tensor, states: Tensor) -> None:
        _lowrank_kernel[(splits, batch * heads, row_blocks)](
            packed,
            left,
            right,
            v,
            indices,
            cos,
            sin,
            log_size,
            into,
            states,
            scale,
            n,
            left.shape[1],
            split_size,
            bucket(n),
            heads,
            *packed.stride()[:3],
            *left.stride()[:2],
            *right.stride()[:3],
            *v.stride()[:3],
            *indices.stride()[:2],
            *cos.stride()[:2],
            *sin.stride()[:2],
            *((0, 0) if log_size is None else log_size.stride()[:2]),
            R=rows,
            D=size,
            DV=value_size,
            RANK=rank,
            HALF=turned // 2,
            ROWS=block_rows,
            BLOCK_HALF=power(turned // 2),
            BLOCK_REST=power(size - turned),
            BLOCK_DV=power(value_size),
            BLOCK_RANK=32,
            INTERLEAVED=interleaved,
            GATHERED=values_gathered,
            HAS_LOG_SIZE=log_size is not None,
            PRECISION=precision(q.dtype),
        )

    return run_splits(launch, splits, out, lse)
