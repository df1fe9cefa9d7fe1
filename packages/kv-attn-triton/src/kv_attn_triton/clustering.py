"""Which tokens of a chunk are alike enough to be merged."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from . import checks
from .dispatch import Impl, use_triton
from .reference import cluster as plain


def cluster(
    keys: Float[Tensor, "B Hkv N D"],
    offsets: Int64[Tensor, " chunks"],
    *,
    theta: float,
    impl: Impl = "auto",
) -> Int64[Tensor, "B Hkv N"]:
    """seed_j = the first seed i < j of j's chunk with cos(k_i, k_j) > theta, or j itself.

    keys [B, H_kv, N, D]; offsets int64[S+1] bound the chunks, the same for all rows and heads, on
    any device. Result int64[B, H_kv, N]: the position of each token's seed, so that seeds are
    where result[n] == n and tokens of one cluster share a number. Chunks of one token (delimiters)
    keep it. Cosines are float32, a zero key is like no other for theta >= 0; theta >= 1 merges
    nothing.

    Checks of the offsets wait for the device they are on: this runs once per prompt.

    Raises ValueError for offsets that do not rise strictly from 0 to N, for theta, shapes or
    impl, TypeError for dtypes. Source: SemantiCache Eq. 2 and Algorithm 1 (text of section 2.3).
    """
    checks.check_rank("keys", keys, 4)
    if keys.dtype not in checks.FLOATS:
        raise TypeError(f"keys must be float32, bfloat16 or float16, got {keys.dtype}")
    if keys.shape[3] == 0:
        raise ValueError("keys must have a head size of at least 1, got 0")
    checks.check_like("keys", keys, keys)
    if not math.isfinite(theta):
        raise ValueError(f"theta must be finite, got {theta}")
    _check_offsets(offsets, keys.shape[2])
    if use_triton(impl, keys):
        from .kernels import cluster as kernel

        return kernel.cluster(keys, offsets, float(theta))
    return plain.cluster(keys, offsets, float(theta))


def _check_offsets(offsets: Tensor, n: int) -> None:
    if offsets.dtype != torch.int64:
        raise TypeError(f"offsets must be int64, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(f"offsets must have shape [S+1], got {list(offsets.shape)}")
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != n:
        raise ValueError(f"offsets must run from 0 to {n}, got {first} to {last}")
    if bool((offsets.diff() <= 0).any()):
        raise ValueError(f"offsets must increase strictly, got {offsets.tolist()}")
