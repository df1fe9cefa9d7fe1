"""Keys rebuilt from factors, rotated and attended without leaving the program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import run_splits
from .launch import (
    MAX_ROWS,
    REBUILDING,
    bucket,
    on_device,
    power,
    precision,
    rows_last,
    split,
    tune,
)
from .online import absorb, dot, finish, place, query_rows


@triton.jit
def _rebuild(  # type: ignore[no-untyped-def]
    left,  # row 0 of the batch's left factor
    right,  # row 0 of the head's right factor
    at,
    valid,
    first,  # one list of columns, and a second of as many
    second,
    l_n,
    r_r,
    WIDTH: tl.constexpr,  # columns in each list
    BOTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left[at] @ right[:, columns] for both lists, rows read once: two tiles [BLOCK_N, BLOCK_W]."""
    inside = tl.arange(0, BLOCK_W) < WIDTH
    x = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    y = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    for i in range(0, RANK, BLOCK_RANK):
        rank = i + tl.arange(0, BLOCK_RANK)
        rows = tl.load(
            left + at[:, None] * l_n + rank[None, :],
            mask=valid[:, None] & (rank[None, :] < RANK),
            other=0.0,
        )
        where = (rank[:, None] < RANK) & inside[None, :]
        basis = tl.load(right + rank[:, None] * r_r + first[None, :], mask=where, other=0.0)
        x += dot(rows, basis, PRECISION)
        if BOTH:
            basis = tl.load(right + rank[:, None] * r_r + second[None, :], mask=where, other=0.0)
            y += dot(rows, basis, PRECISION)
    return x.to(left.dtype.element_ty), y.to(left.dtype.element_ty)


@triton.jit
def _table(x, at, valid, column, t_n, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = tl.arange(0, BLOCK_W) < WIDTH
    where = valid[:, None] & inside[None, :]
    return tl.load(x + at[:, None] * t_n + column[None, :], mask=where, other=0.0).to(tl.float32)


@triton.jit
def _query(at_q, rows, column, R: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = tl.arange(0, BLOCK_W) < WIDTH
    where = (rows[:, None] < R) & inside[None, :]
    return tl.load(at_q[:, None] + column[None, :], mask=where, other=0.0)


@tune(["D", "DV", "RANK", "ROWS", "tuned_for"], REBUILDING)
@triton.jit(
    do_not_specialize=["n", "n_keys", "split_size", "tuned_for", "i_b", "i_h", "z_b", "z_h"]
)
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
    q_j,
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
    Q: tl.constexpr,
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
    part, rows = place(R, ROWS)
    row_head = tl.program_id(1).to(tl.int64)
    b = row_head // heads
    h = row_head % heads
    dv = tl.arange(0, BLOCK_DV)
    pair = tl.arange(0, BLOCK_HALF)
    first = pair * 2 if INTERLEAVED else pair
    second = pair * 2 + 1 if INTERLEAVED else pair + HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    REST: tl.constexpr = D - 2 * HALF

    at_q = query_rows(q, b, h, rows, q_b, q_h, q_j, Q, R)
    first_q = _query(at_q, rows, first, R, HALF, BLOCK_HALF)
    second_q = _query(at_q, rows, second, R, HALF, BLOCK_HALF)
    rest_q = _query(at_q, rows, rest, R, REST, BLOCK_REST)
    left_b = left + b * l_b
    right_h = right + b * r_b + h * r_h
    cos_b = cos + b * c_b
    sin_b = sin + b * s_b

    outside = tl.zeros([BLOCK_N], tl.int32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    start = part * split_size
    stop = tl.minimum(start + split_size, n)
    for i in range(start, stop, BLOCK_N):
        entry = i + tl.arange(0, BLOCK_N)
        at = tl.load(indices + b * i_b + h * i_h + entry, mask=entry < stop, other=-1)
        outside = outside | ((at >= n_keys) | (at < -1)).to(tl.int32)
        valid = (at >= 0) & (at < n_keys)
        s = tl.zeros([ROWS, BLOCK_N], tl.float32)
        if HALF > 0:
            x, y = _rebuild(
                left_b, right_h, at, valid, first, second, l_n, r_r,
                HALF, True, RANK, BLOCK_N, BLOCK_HALF, BLOCK_RANK, PRECISION,
            )  # fmt: skip
            x = x.to(tl.float32)
            y = y.to(tl.float32)
            # both columns of a pair turn by the same angle
            cosine = _table(cos_b, at, valid, first, c_n, HALF, BLOCK_HALF)
            sine = _table(sin_b, at, valid, first, s_n, HALF, BLOCK_HALF)
            turned = (x * cosine - y * sine).to(first_q.dtype)
            s += dot(first_q, tl.trans(turned), PRECISION)
            turned = (y * cosine + x * sine).to(first_q.dtype)
            s += dot(second_q, tl.trans(turned), PRECISION)
        if REST > 0:
            x, y = _rebuild(
                left_b, right_h, at, valid, rest, rest, l_n, r_r,
                REST, False, RANK, BLOCK_N, BLOCK_REST, BLOCK_RANK, PRECISION,
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
    poisoned = tl.max(outside, 0) > 0
    finish(out, lse, peak, total, acc, poisoned, part, row_head, rows, R, DV, BLOCK_DV)


@on_device
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
    q, indices = rows_last(q), rows_last(indices)
    cos, sin = (rows_last(x).expand(batch, -1, -1) for x in (cos, sin))
    log_size = None if log_size is None else rows_last(log_size)
    block_rows = min(MAX_ROWS, power(rows))
    row_blocks = triton.cdiv(rows, block_rows)
    splits, split_size = split(n, batch * heads * row_blocks, q.device)

    def launch(into: Tensor, states: Tensor) -> None:
        _lowrank_kernel[(splits * row_blocks, batch * heads)](
            q,
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
            bucket(split_size),
            heads,
            *q.stride()[:3],
            *left.stride()[:2],
            *right.stride()[:3],
            *v.stride()[:3],
            *indices.stride()[:2],
            *cos.stride()[:2],
            *sin.stride()[:2],
            *((0, 0) if log_size is None else log_size.stride()[:2]),
            Q=queries,
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
