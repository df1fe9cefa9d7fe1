"""Any number of partial results merged by one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device, power

BLOCK = 4  # rows of a program


@triton.jit(do_not_specialize=["rows"])
def _parts_kernel(  # type: ignore[no-untyped-def]
    outs,  # of each part [rows, DV]
    states,  # of each part [rows]
    out,
    lse,
    rows,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """lse = log sum exp(lse_i), out = sum exp(lse_i - lse) out_i; a part's zero weight reads 0."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dv = tl.arange(0, BLOCK_DV)
    inside = row < rows
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    for i in tl.static_range(len(states)):
        peak = tl.maximum(peak, tl.load(states[i] + row, mask=inside, other=-float("inf")))
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_DV], tl.float32)
    for i in tl.static_range(len(states)):
        weight = tl.exp(tl.load(states[i] + row, mask=inside, other=-float("inf")) - peak)
        part = tl.load(
            outs[i] + row[:, None] * DV + dv[None, :],
            mask=(weight != 0.0)[:, None] & (dv[None, :] < DV),
            other=0.0,
        )
        total += weight
        acc += part.to(tl.float32) * weight[:, None]
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + row, tl.where(empty, -float("inf"), peak + tl.log(total)), mask=inside)
    tl.store(
        out + row[:, None] * DV + dv[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None] & (dv[None, :] < DV),
    )


@on_device
def merge_states(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See `kv_attn_triton.merge_states`."""
    outs = tuple(out.contiguous() for out, _ in parts)
    states = tuple(lse.contiguous() for _, lse in parts)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(states[0])
    rows, value_size = lse.numel(), out.shape[-1]
    if out.numel():
        _parts_kernel[(triton.cdiv(rows, BLOCK),)](
            outs,
            states,
            out,
            lse,
            rows,
            DV=value_size,
            BLOCK_DV=power(value_size),
            BLOCK=BLOCK,
        )
    return out, lse
