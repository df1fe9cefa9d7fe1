"""Device functions the attention kernels share: one step of streaming softmax, and its end."""

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
    """Stores (out, lse) of one split's rows: zeros and -inf when empty, NaN when poisoned."""
    dv = tl.arange(0, BLOCK_DV)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    state = tl.where(empty, -float("inf"), peak + tl.log(total))
    acc = acc / total[:, None]
    state = tl.where(poisoned, float("nan"), state)
    acc = tl.where(poisoned, float("nan"), acc)
    place = (part.to(tl.int64) * tl.num_programs(1) + row_head) * R + rows
    tl.store(lse + place, state, mask=rows < R)
    tl.store(
        out + place[:, None] * DV + dv[None, :],
        acc.to(out.dtype.element_ty),
        mask=(rows[:, None] < R) & (dv[None, :] < DV),
    )
