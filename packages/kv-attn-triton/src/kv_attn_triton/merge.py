"""Partial attention results, and the result over their union."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from .dispatch import Impl, use_triton

# exp(-inf - FLOOR) is 0 where exp(-inf - -inf) would be NaN
FLOOR = torch.finfo(torch.float32).min


def merge_states(
    parts: Sequence[tuple[Float[Tensor, "B Hq Q Dv"], Float32[Tensor, "B Hq Q"]]],
    *,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "B Hq Q Dv"], Float32[Tensor, "B Hq Q"]]:
    """lse = log sum_i exp(lse_i); out = sum_i exp(lse_i - lse) out_i.

    parts: one or more `(out [B, H_q, Q, Dv], lse float32[B, H_q, Q])` over disjoint entries, as
    the attention functions return them. An empty part (zeros, lse = -inf) changes nothing; all
    parts empty give zeros and -inf. Sums are float32, the result has the first part's dtype. The
    Triton kernel takes all parts in one launch.

    Raises ValueError for no parts, unequal shapes or devices, or impl, TypeError for unequal
    dtypes.
    Source: the second stage of flash-decoding; the merge in streaming softmax.
    """
    if len(parts) == 0:
        raise ValueError("parts must hold at least one (out, lse), got none")
    first, first_lse = parts[0]
    for i, (out, lse) in enumerate(parts):
        if out.shape != first.shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"parts[{i}] must have out {list(first.shape)} and lse {list(first.shape[:-1])}, "
                f"got {list(out.shape)} and {list(lse.shape)}"
            )
        if out.dtype != first.dtype or lse.dtype != torch.float32:
            raise TypeError(
                f"parts[{i}] must have out {first.dtype} and lse torch.float32, "
                f"got {out.dtype} and {lse.dtype}"
            )
        if out.device != first.device or lse.device != first.device:
            raise ValueError(f"parts[{i}] must be on {first.device}, got {out.device}")
    triton = use_triton(impl, first)
    if len(parts) == 1:
        return first, first_lse
    if triton:
        from .kernels import merge as kernel

        return kernel.merge_states(parts)
    stacked = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(stacked, 0)
    weights = torch.exp(stacked - total.clamp_min(FLOOR)).unsqueeze(-1)
    merged = first.float() * weights[0]
    for i in range(1, len(parts)):
        merged.addcmul_(parts[i][0].float(), weights[i])
    return merged.to(first.dtype), total
