"""Device functions the kernels share: their query rows, one step of streaming softmax, its end."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b, summed in float32."""
    if PRECISION == "upcast":
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@triton.jit
def place(R: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(part, rows): which split this program streams, for which of the R query rows of its head.

    Programs of one split stand side by side on the first axis of the grid: they share its keys.
    """
    blocks: tl.constexpr = (R + ROWS - 1) // ROWS
    part = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    return part, rows


@triton.jit
def query_rows(  # type: ignore[no-untyped-def]
    q, b, h, rows, q_b, q_h, q_j, Q: tl.constexpr, R: tl.constexpr
):
    """Where the packed rows of KV head h start: row g*Q + j is query j of the group's head g."""
    head = h * (R // Q) + rows // Q
    return q + b * q_b + head.to(tl.int64) * q_h + (rows % Q).to(tl.int64) * q_j


@triton.jit
def absorb(s, values, peak, total, acc, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Running (peak, total, acc) after scores s [rows, n] of values [n, Dv]."""
    new_peak = tl.maximum(peak, tl.max(s, 1))
    # -inf - -inf is NaN: rows that have seen nothing yet are measured from 0
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    shrink = tl.exp(peak - base)
    p = tl.exp(s - base[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + dot(p.to(values.dtype), values, PRECISION)
    return new_peak, total, acc


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    out,
    lse,
    peak,
    total,
    acc,
    poisoned,
    part,
    row_head,
    rows,
    R: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Stores (out, lse) of one split's rows: zeros and -inf when empty, NaN when poisoned.

    The zeros of splits after the first are left out: merging does not read them.
    """
    dv = tl.arange(0, BLOCK_DV)
    empty = total == 0.0
    written = (rows < R) & (tl.where(part == 0, 1.0, total) != 0.0)
    total = tl.where(empty, 1.0, total)
    state = tl.where(empty, -float("inf"), peak + tl.log(total))
    acc = acc / total[:, None]
    state = tl.where(poisoned, float("nan"), state)
    acc = tl.where(poisoned, float("nan"), acc)
    here = (part.to(tl.int64) * tl.num_programs(1) + row_head) * R + rows
    tl.store(lse + here, state, mask=rows < R)
    tl.store(
        out + here[:, None] * DV + dv[None, :],
        acc.to(out.dtype.element_ty),
        mask=written[:, None] & (dv[None, :] < DV),
    )
