"""Singular value decompositions of many small matrices at once, by the Gram matrix of their smaller
side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_SMALLEST = 1e-6  # of a matrix' largest singular value: anything below is rounding, and held as 0
_STEEP = 1e-4  # below that share of it, directions from the Gram matrix are no longer orthogonal
_MANY = 32  # eigenproblems that are worth a thread of their own


def small_svds(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """u [N, L, R], sigma [N, R] and vh [N, R, D] of x [N, L, D] in float64, R = min(rank, L, D).

    float64, whatever x is in: squaring a matrix halves the digits that are left of its small
    singular values, and caches have a mean that outweighs everything else by far. Components below
    `_SMALLEST` are 0 in all three.
    """
    x = x.double()
    rank = min(rank, *x.shape[1:])
    tall = x.shape[-2] > x.shape[-1]
    vectors = _eigenvectors(x.mT @ x if tall else x @ x.mT)[..., -rank:].flip(-1)
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
    return u, sigma, vh


def _eigenvectors(gram: Tensor) -> Tensor:
    """Columns [N, M, M] in the order of their eigenvalues, of `gram` [N, M, M].

    torch solves the problems of a batch one after the other on the CPU, whatever its threads.
    """
    parts = min(torch.get_num_threads(), len(gram) // _MANY) if gram.device.type == "cpu" else 1
    if parts < 2:
        return torch.linalg.eigh(gram).eigenvectors
    with ThreadPoolExecutor(parts) as pool:
        solved = pool.map(torch.linalg.eigh, gram.tensor_split(parts))
        return torch.cat([each.eigenvectors for each in solved])


def _orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt of nearly orthonormal columns [N, L, R] in their order; zero columns stay."""
    q, r = torch.linalg.qr(columns)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
