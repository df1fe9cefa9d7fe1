"""Singular value decompositions of many small matrices at once, by the Gram matrix of their smaller
side."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 1e-6  # of a matrix' largest singular value: anything below is rounding, and held as 0
_STEEP = 1e-4  # below that share of it, directions from the Gram matrix are no longer orthogonal
_CLEAR = 1e-4  # of the largest eigenvalue: what stands above it is the same for half precision


def small_svds(x: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """u [N, L, R], sigma [N, R] and vh [N, R, D] of x [N, L, D], R = min(rank, L, D), for factors
    in `dtype`.

    In float64, whatever x is in: squaring a matrix halves the digits that are left of its small
    singular values, and caches have a mean that outweighs everything else by far. For factors in
    half precision float32 does, for all matrices whose R eigenvalues stand above `_CLEAR` of the
    largest. Components below `_SMALLEST` are 0 in all three.
    """
    rank = min(rank, *x.shape[1:])
    if dtype.itemsize > 2:
        return _svds(x.double(), rank)[:3]
    *found, values = _svds(x.float(), rank)
    unclear = ~(values[:, 0] > _CLEAR * values[:, -1])
    if bool(unclear.any()):
        for part, again in zip(found, _svds(x[unclear].double(), rank), strict=False):
            part[unclear] = again.float()
    u, sigma, vh = found
    return u, sigma, vh


def _svds(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, sigma and vh of x [N, L, D] in its dtype, and the eigenvalues [N, R], which rise."""
    tall = x.shape[-2] > x.shape[-1]
    values, vectors = torch.linalg.eigh(x.mT @ x if tall else x @ x.mT)
    vectors = vectors[..., -rank:].flip(-1)
    if tall:
        u, vh, axis = x @ vectors, vectors.mT, -2
    else:
        u, vh, axis = vectors, vectors.mT @ x, -1
    product = u if tall else vh  # the side that still carries sigma
    sigma = product.norm(dim=axis)
    sigma *= sigma > _SMALLEST * sigma[..., :1]
    present = sigma > 0
    product.div_(torch.where(present, sigma, torch.inf).unsqueeze(axis))
    steep = (present & (sigma < _STEEP * sigma[..., :1])).any(-1)
    if bool(steep.any()):
        product[steep] = _orthonormal(product[steep].movedim(axis, -2)).movedim(-2, axis)
    (vectors if tall else u).mul_(present[..., None, :])
    return u, sigma, vh, values[:, -rank:]


def _orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt of nearly orthonormal columns [N, L, R] in their order; zero columns stay."""
    q, r = torch.linalg.qr(columns)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
