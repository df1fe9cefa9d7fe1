"""Random cases shared by the tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**31 - 1)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
batches = st.lists(st.integers(1, 3), max_size=2).map(tuple)
precision = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spectrum(seed: int, batch: tuple[int, ...], tokens: int, width: int, decay: float) -> Tensor:
    """A float64 matrix [..., T, D] with singular values decay ** i."""
    generator = torch.Generator().manual_seed(seed)
    least = min(tokens, width)
    left = torch.randn(*batch, tokens, least, generator=generator, dtype=torch.float64)
    right = torch.randn(*batch, width, least, generator=generator, dtype=torch.float64)
    sigma = decay ** torch.arange(least, dtype=torch.float64)
    return torch.linalg.qr(left).Q * sigma @ torch.linalg.qr(right).Q.mT


def tail(x: Tensor, rank: int) -> Tensor:
    """Frobenius norm of what the best approximation of this rank leaves, by a float64 SVD."""
    sigma = torch.linalg.svdvals(x.double())
    return sigma[..., rank:].square().sum(-1).sqrt()
