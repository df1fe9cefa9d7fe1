"""Products of float32 matrices on a CPU, by the faster of the two libraries that torch has."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import linear


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y^T: [L, M, D] and [L, N, D] -> [L, M, N], in their dtype under autocast, too.

    torch gives float32 matrices to MKL, which on processors that are not Intel's works at half the
    width; `linear` on torch's oneDNN tensors does not, at the price of a copy of one factor, here
    the smaller one, and of the result.
    """
    device = x.device.type
    casts = torch.amp.is_autocast_available(device)
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        if len(x) != 1 or not _by_onednn(x) or not _by_onednn(y):
            return x @ y.mT
        if x.numel() > y.numel():
            return linear(y[0].to_mkldnn(), x[0]).to_dense().mT[None]
        return linear(x[0].to_mkldnn(), y[0]).to_dense()[None]


def _by_onednn(x: Tensor) -> bool:
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and x.numel() > 0
