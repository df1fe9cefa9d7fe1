"""Spans held as low-rank factors, attended without rebuilding a key or a value.

A program takes a few spans of one KV head, one after the other. It multiplies the queries by a
span's right factor of keys once, streams the span's left rows, which give the scores and the
weighted sum of left rows of values, and multiplies that sum by the right factor of values. Long
spans are cut into pieces of PIECE entries, which are programs of their own.
"""

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
    share,
    tune,
)
from .online import absorb, dot, finish, place, query_rows

PIECE = 512  # entries past which reading a span's right factors a second time costs little


@tune(["D", "DV", "RANK", "VALUE_RANK", "ROWS", "tuned_for"], REBUILDING)
@triton.jit(
    do_not_specialize=[
        "n", "count", "listed", "split_size", "longest", "pieces", "piece_size", "tuned_for",
        "o_b", "s_b", "s_h",
    ]
)  # fmt: skip
def _span_kernel(  # type: ignore[no-untyped-def]
    q,
    k_left,
    k_right,
    v_left,
    v_right,
    offsets,
    spans,
    out,
    lse,
    scale,
    n,
    count,  # spans that there are
    listed,  # spans that each head lists
    split_size,
    longest,
    pieces,
    piece_size,
    tuned_for,
    heads,
    q_b,
    q_h,
    q_j,
    kl_b,
    kl_h,
    kl_n,
    kr_b,
    kr_h,
    kr_s,
    vl_b,
    vl_h,
    vl_n,
    vr_b,
    vr_h,
    vr_s,
    o_b,
    s_b,
    s_h,
    Q: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    VALUE_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_VALUE_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # sums are float32 and stay so when the other factor multiplies them, whatever its dtype
    FULL: tl.constexpr = "tf32x3"
    part, rows = place(R, ROWS)
    piece = part % pieces
    row_head = tl.program_id(1).to(tl.int64)
    b = row_head // heads
    h = row_head % heads
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    rank = tl.arange(0, BLOCK_RANK)
    value_rank = tl.arange(0, BLOCK_VALUE_RANK)
    k_left += b * kl_b + h * kl_h
    k_right += b * kr_b + h * kr_h
    v_left += b * vl_b + h * vl_h
    v_right += b * vr_b + h * vr_h

    at_q = query_rows(q, b, h, rows, q_b, q_h, q_j, Q, R)
    queries = tl.load(
        at_q[:, None] + d[None, :], mask=(rows[:, None] < R) & (d[None, :] < D), other=0.0
    )
    strays = 0
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    first = part // pieces * split_size
    for e in range(first, tl.minimum(first + split_size, listed)):
        span = tl.load(spans + b * s_b + h * s_h + e)
        known = (span >= 0) & (span < count)
        start = tl.load(offsets + b * o_b + span, mask=known, other=0)
        stop = tl.load(offsets + b * o_b + span + 1, mask=known, other=0)
        wrong = (span < -1) | (span >= count)
        wrong = wrong | (start < 0) | (stop > n) | (stop < start) | (stop - start > longest)
        strays += wrong.to(tl.int32)
        low = start + piece * piece_size
        high = tl.where(wrong, low, tl.minimum(stop, low + piece_size))
        some = high > low
        basis = tl.load(
            k_right + span * kr_s + rank[None, :] * D + d[:, None],
            mask=some & (rank[None, :] < RANK) & (d[:, None] < D),
            other=0.0,
        )
        turned = dot(queries, basis, PRECISION)
        before = peak
        inner = tl.zeros([ROWS, BLOCK_VALUE_RANK], tl.float32)
        for i in range(low, high, BLOCK_N):
            at = i + tl.arange(0, BLOCK_N)
            valid = at < high
            left = tl.load(
                k_left + at[None, :] * kl_n + rank[:, None],
                mask=valid[None, :] & (rank[:, None] < RANK),
                other=0.0,
            )
            s = dot(turned, left.to(tl.float32), FULL) * scale
            s = tl.where(valid[None, :], s, -float("inf"))
            values = tl.load(
                v_left + at[:, None] * vl_n + value_rank[None, :],
                mask=valid[:, None] & (value_rank[None, :] < VALUE_RANK),
                other=0.0,
            )
            peak, total, inner = absorb(s, values.to(tl.float32), peak, total, inner, FULL)
        basis = tl.load(
            v_right + span * vr_s + value_rank[:, None] * DV + dv[None, :],
            mask=some & (value_rank[:, None] < VALUE_RANK) & (dv[None, :] < DV),
            other=0.0,
        )
        base = tl.where(peak == -float("inf"), 0.0, peak)
        acc = acc * tl.exp(before - base)[:, None] + dot(inner, basis.to(tl.float32), FULL)
    finish(out, lse, peak, total, acc, strays > 0, part, row_head, rows, R, DV, BLOCK_DV)


@on_device
def span_attention(
    q: Tensor,
    k_left: Tensor,
    k_right: Tensor,
    v_left: Tensor,
    v_right: Tensor,
    offsets: Tensor,
    spans: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `kv_attn_triton.span_attention`."""
    batch, query_heads, queries, size = q.shape
    heads, n, rank = k_left.shape[1:]
    value_rank, value_size = v_right.shape[3:]
    rows = query_heads // heads * queries
    out = q.new_empty(batch, query_heads, queries, value_size)
    lse = q.new_empty(batch, query_heads, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q, spans = rows_last(q), rows_last(spans)
    offsets = rows_last(offsets).expand(batch, -1)
    block_rows = min(MAX_ROWS, power(rows))
    row_blocks = triton.cdiv(rows, block_rows)
    pieces = triton.cdiv(min(longest, max(n, 1)), PIECE)
    splits, split_size = share(spans.shape[2], batch * heads * row_blocks, q.device)

    def launch(into: Tensor, states: Tensor) -> None:
        _span_kernel[(splits * pieces * row_blocks, batch * heads)](
            q,
            k_left,
            k_right,
            v_left,
            v_right,
            offsets,
            spans,
            into,
            states,
            scale,
            n,
            k_right.shape[2],
            spans.shape[2],
            split_size,
            longest,
            pieces,
            PIECE,
            bucket(split_size * min(longest, PIECE)),
            heads,
            *q.stride()[:3],
            *k_left.stride()[:3],
            *k_right.stride()[:3],
            *v_left.stride()[:3],
            *v_right.stride()[:3],
            offsets.stride(0),
            *spans.stride()[:2],
            Q=queries,
            R=rows,
            D=size,
            DV=value_size,
            RANK=rank,
            VALUE_RANK=value_rank,
            ROWS=block_rows,
            BLOCK_D=power(size),
            BLOCK_DV=power(value_size),
            BLOCK_RANK=power(rank),
            BLOCK_VALUE_RANK=power(value_rank),
            PRECISION=precision(q.dtype),
        )

    return run_splits(launch, splits * pieces, out, lse)
