"""Truncated singular value decomposition: exact, by the Gram matrix, or randomized."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kv_lowrank._checks import (
    check_choice,
    check_device,
    check_dtype,
    check_finite,
    check_floating,
    check_positive,
)
from kv_lowrank._products import product
from kv_lowrank.factors import LowRank

Method: TypeAlias = Literal["auto", "exact", "gram", "randomized"]

_ROWS = 1024  # rows multiplied together before their products are added in float64
_OVERSAMPLE = 10  # extra directions of the randomized range finder
_ITERATIONS = 4  # its power iterations


def choose_method(tokens: int, width: int) -> Literal["exact", "gram"]:
    """What `truncated_svd(method="auto")` does with a [tokens, width] matrix, known by its shape.

    `gram` where tokens >= width (its eigenproblem is then no larger than the SVD's own core),
    `exact` otherwise. `randomized` is never chosen unasked: it is approximate.
    """
    return "gram" if tokens >= width else "exact"


@torch.no_grad()
def truncated_svd(
    x: Float[Tensor, "*batch t d"],
    rank: int,
    *,
    method: Method = "auto",
    mask: Bool[Tensor, "*batch t"] | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LowRank:
    """Nearest matrix of rank r: x ~ left @ right with left = U S, right = V^T (Eckart-Young).

    Shapes: `x` [..., T, D]; `left` [..., T, r] and `right` [..., r, D], r = min(rank, T, D), in
    `dtype` (that of `x` unless given). Rows of `right` are orthonormal, singular values fall;
    computed in float32 at least. `mask` is True where a row exists: the others are never read
    and their rows of `left` are 0, so a padded matrix equals the short one.

    `method`: `exact` is LAPACK's (or cuSOLVER's) SVD. `gram` is as good and much cheaper for
    T >> D: the D x D eigenproblem of x^T x, summed in float64; float32 input multiplies in
    float32 as long as the smallest kept eigenvalue stands far enough above that rounding
    (1e-5 of the largest), else everything is done again in float64. `randomized` is a range
    finder with power iterations (Halko et al. 2011), fixed by `seed`: its error is within a few
    percent of the best. `auto` is what `choose_method` says.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, `rank` < 1, `method`, NaN or
    infinite values. Source: ShadowKV Algorithm 1 (`x` = pre-RoPE keys of all heads side by side,
    [B, T, H_kv * D]).
    """
    check_floating("x", x, least=2)
    check_positive("rank", rank)
    check_choice("method", method, ("auto", "exact", "gram", "randomized"))
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")
    if mask is not None:
        check_dtype("mask", mask, torch.bool)
        check_device("mask", mask, x.device)
        if mask.shape != x.shape[:-1]:
            raise ValueError(f"mask must have shape {tuple(x.shape[:-1])}, got {tuple(mask.shape)}")
        x = x.masked_fill(~mask[..., None], 0.0)
    check_finite("x", x)
    tokens, width = x.shape[-2:]
    batch = x.shape[:-2]
    flat = x.reshape(math.prod(batch), tokens, width)
    rank = min(rank, tokens, width)
    if method == "auto":
        method = choose_method(tokens, width)
    dtype = x.dtype if dtype is None else dtype
    if rank == 0 or flat.shape[0] == 0:
        basis = flat.new_zeros(flat.shape[0], width, rank)
    elif method == "exact":
        _, _, vh = torch.linalg.svd(flat.to(_work(flat)), full_matrices=False)
        basis = vh[:, :rank].mT
    elif method == "gram":
        basis = _gram_basis(flat, rank)
    else:
        basis = _random_basis(flat, rank, seed)
    left, right = _coordinates(flat, basis, dtype), basis.mT.to(dtype)
    return LowRank(left.reshape(*batch, tokens, rank), right.reshape(*batch, rank, width))


def _work(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _pieces(x: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of x [N, T, D] in `dtype`: never a second copy of the whole."""
    for start in range(0, x.shape[1], _ROWS):
        part = slice(start, min(start + _ROWS, x.shape[1]))
        yield part, x[:, part].to(dtype)


def _coordinates(x: Tensor, basis: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ basis: [N, T, r]."""
    left = x.new_empty(*x.shape[:2], basis.shape[-1], dtype=dtype)
    for part, block in _pieces(x, basis.dtype):
        left[:, part] = block @ basis
    return left


def _gram(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Upper triangle of x^T x in float64 [N, D, D]; products of a block of rows in `dtype`."""
    width = x.shape[-1]
    gram = x.new_zeros(x.shape[0], width, width, dtype=torch.float64)
    step = max(64, math.ceil(width / 8))
    for _, block in _pieces(x, dtype):
        across = block.mT.contiguous()
        for start in range(0, width, step):
            columns = slice(start, start + step)
            gram[:, columns, start:] += product(across[:, columns], across[:, start:])
    return gram


def _gram_basis(x: Tensor, rank: int) -> Tensor:
    """The `rank` leading eigenvectors of x^T x as columns: [N, D, r], float32 or float64."""
    if x.dtype != torch.float64 and torch.get_float32_matmul_precision() == "highest":
        values, vectors = torch.linalg.eigh(_gram(x, torch.float32).float(), UPLO="U")
        # Rounding turns a kept direction towards a dropped one the more, the smaller its
        # eigenvalue beside the largest.
        if bool((values[:, -rank] > 1e-5 * values[:, -1]).all()):
            return vectors[..., -rank:].flip(-1)
    _, vectors = torch.linalg.eigh(_gram(x, torch.float64), UPLO="U")
    return vectors[..., -rank:].flip(-1).to(_work(x))


def _random_basis(x: Tensor, rank: int, seed: int) -> Tensor:
    """Leading right singular vectors inside the range of powers of x^T x: [N, D, r]."""
    wide = min(rank + _OVERSAMPLE, *x.shape[1:])
    generator = torch.Generator(x.device).manual_seed(seed)
    x = x.to(_work(x))
    basis = torch.randn(
        x.shape[0], x.shape[2], wide, generator=generator, device=x.device, dtype=x.dtype
    )
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(x @ basis).Q
        basis = torch.linalg.qr(x.mT @ basis).Q
    # Singular directions inside the space found, best first.
    _, _, vh = torch.linalg.svd(x @ basis, full_matrices=False)
    return basis @ vh.mT[..., :rank]
