"""Low-rank factors and what is read from them: rows, new rows, spectra, similarity."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kv_lowrank._checks import (
    check_device,
    check_finite,
    check_floating,
    check_indices,
    check_positive,
)


class LowRank(NamedTuple):
    """A matrix [..., T, D] held as `left @ right`.

    `left` [..., T, r] is U S (row t belongs to token t), `right` [..., r, D] is V^T with
    orthonormal rows. Leading dimensions broadcast: heads factored together share a `left` of
    [B, 1, T, r] beside a `right` of [B, H, r, D] (`split_heads`).
    """

    left: Tensor
    right: Tensor


def rows(factors: LowRank, indices: Int64[Tensor, "*batch k"]) -> Float[Tensor, "*batch k d"]:
    """Chosen rows of the product: out_k = left[indices_k] @ right, 0 where indices_k is -1.

    Shapes: `left` [..., T, r] and `right` [..., r, D] broadcast against `indices` int64[..., K];
    only the chosen rows of `left` are read. Result [..., K, D] in the dtype of the factors.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices; indices out of range raise
    too, on the CPU from here, elsewhere from the device. Source: ShadowKV Algorithm 2.
    """
    left, right = _checked(factors)
    check_indices("indices", indices, left.shape[-2])
    check_device("indices", indices, left.device)
    batch = indices.shape[:-1]
    for name, part in (("left", left), ("right", right)):
        if not _broadcasts(part.shape[:-2], batch):
            raise ValueError(
                f"indices must have the leading dimensions of {name} {tuple(part.shape)}, "
                f"got {tuple(indices.shape)}"
            )
    absent = indices < 0
    chosen = _take(left, indices.clamp_min(0)) @ right
    return chosen.masked_fill_(absent[..., None], 0.0)


def project(
    factors: LowRank, new_rows: Float[Tensor, "*batch n d"]
) -> Float[Tensor, "*left_batch n r"]:
    """Coordinates of new rows on the factors' right basis: new_rows @ right^T.

    The result [..., n, r] is what to append to `left`: `result @ right` is the nearest matrix to
    `new_rows` in the row space of `right`. Where heads share a left factor (size 1 against the
    heads of `right`), the sum over the heads is their common coordinate.

    Shapes: `new_rows` [..., n, D] with the leading dimensions of `right`. Result in the dtype of
    `left`. Raises ValueError or TypeError for wrong shapes, dtypes, devices.
    Source: ShadowKV section 4.1 (ShadowKV+).
    """
    left, right = _checked(factors)
    check_floating("new_rows", new_rows, least=2)
    check_device("new_rows", new_rows, right.device)
    if new_rows.shape[:-2] != right.shape[:-2] or new_rows.shape[-1] != right.shape[-1]:
        raise ValueError(
            f"new_rows must have the leading dimensions and the width of right "
            f"{tuple(right.shape)}, got {tuple(new_rows.shape)}"
        )
    work = torch.promote_types(right.dtype, torch.float32)
    result = new_rows.to(work) @ right.to(work).mT
    shared = [
        axis for axis, size in enumerate(left.shape[:-2]) if size == 1 and right.shape[axis] != 1
    ]
    if shared:
        result = result.sum(shared, keepdim=True)
    return result.to(left.dtype)


def split_heads(factors: LowRank, heads: int) -> LowRank:
    """Factors of heads side by side, [B, T, H*D], as factors per head: views, nothing is copied.

    x[:, :, h*D:(h+1)*D] = left @ right[:, :, h*D:(h+1)*D]: the heads share `left` [B, 1, T, r]
    and each has its `right` [B, H, r, D]. Raises ValueError for a width that `heads` does not
    divide. Source: ShadowKV Algorithm 1 (A is shared, B is per head).
    """
    left, right = _checked(factors)
    check_positive("heads", heads)
    if right.shape[-1] % heads:
        raise ValueError(f"heads must divide the width {right.shape[-1]}, got {heads}")
    parts = right.unflatten(-1, (heads, right.shape[-1] // heads))
    return LowRank(left.unsqueeze(-3), parts.movedim(-2, -3))


def singular_values(factors: LowRank) -> Float[Tensor, "*batch r"]:
    """Singular values of the product, falling: the column norms of `left` = U S, float32 or 64."""
    left, _ = _checked(factors)
    return left.to(torch.promote_types(left.dtype, torch.float32)).norm(dim=-2)


def subspace_similarity(
    one: Float[Tensor, "*batch r d"], other: Float[Tensor, "*batch r d"]
) -> Float[Tensor, "*batch"]:
    """How much two row spaces of rank r share: <P_1, P_2> / r, P the orthogonal projections.

    1 for the same subspace, 0 for orthogonal ones: the mean squared cosine of their principal
    angles, ||Q_1 Q_2^T||_F^2 / r. Shapes: two right factors [..., r, D] with r <= D, made
    orthonormal here (their rows must be independent); result [...], float32 or float64.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices, NaN.
    Source: ShadowKV section 3.1.
    """
    check_floating("one", one, least=2)
    check_floating("other", other, least=2)
    check_device("other", other, one.device)
    if one.shape != other.shape or not 1 <= one.shape[-2] <= one.shape[-1]:
        raise ValueError(
            f"one and other must both be [..., r, D] with 1 <= r <= D, "
            f"got {tuple(one.shape)} and {tuple(other.shape)}"
        )
    check_finite("one", one)
    check_finite("other", other)
    work = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    basis, second = (torch.linalg.qr(part.to(work).mT).Q for part in (one, other))
    return (basis.mT @ second).square().sum((-2, -1)).div(one.shape[-2]).clamp_max(1.0)


def _checked(factors: LowRank) -> LowRank:
    """The factors, after a look at their shapes."""
    left, right = factors
    check_floating("left", left, least=2)
    check_floating("right", right, least=2)
    check_device("right", right, left.device)
    if left.ndim != right.ndim or left.shape[-1] != right.shape[-2] or left.dtype != right.dtype:
        raise ValueError(
            f"left and right must be [..., T, r] and [..., r, D] of one dtype, got "
            f"{tuple(left.shape)} of {left.dtype} and {tuple(right.shape)} of {right.dtype}"
        )
    return LowRank(left, right)


def _broadcasts(shape: torch.Size, wanted: torch.Size) -> bool:
    """Whether `shape` expands to `wanted` without growing it."""
    return len(shape) == len(wanted) and all(
        size in (1, want) for size, want in zip(shape, wanted, strict=True)
    )


def _take(left: Tensor, indices: Tensor) -> Tensor:
    """left[..., indices, :] with leading dimensions of size 1 shared: [..., K, r]."""
    axes = indices.ndim - 1
    picks = []
    for axis in range(axes):
        size = indices.shape[axis] if left.shape[axis] != 1 else 1
        place = torch.arange(size, device=left.device)
        picks.append(place.view([-1 if other == axis else 1 for other in range(axes + 1)]))
    return left[(*picks, indices)]
