"""Which implementation a call runs on."""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal

import torch

Impl = Literal["auto", "triton", "reference"]


@functools.cache
def triton_installed() -> bool:
    """Whether `import triton` would find something; asked once per process."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def too_old(device: torch.device) -> bool:
    """An NVIDIA GPU before compute capability 8.0: no bfloat16 and no TF32 products."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)


def use_triton(impl: str, tensor: torch.Tensor) -> bool:
    """True for the Triton kernels, False for the plain-torch path.

    `auto` is Triton for CUDA tensors where triton is installed and the GPU has compute capability
    8.0 or more, torch everywhere else.
    `triton` raises ValueError, naming why, when the kernels cannot run on `tensor`.
    """
    if impl == "reference":
        return False
    if impl == "auto":
        return tensor.is_cuda and triton_installed() and not too_old(tensor.device)
    if impl != "triton":
        raise ValueError(f"impl must be 'auto', 'triton' or 'reference', got {impl!r}")
    if not triton_installed():
        raise ValueError("impl='triton' cannot be met: triton is not installed")
    if tensor.is_cuda:
        if too_old(tensor.device):
            raise ValueError(
                f"impl='triton' cannot be met: {tensor.device} has a compute capability below 8.0"
            )
        return True
    from triton import knobs

    if not knobs.runtime.interpret:
        raise ValueError(
            f"impl='triton' cannot be met: tensors are on {tensor.device}, the kernels need CUDA "
            "(or TRITON_INTERPRET=1 set before triton is imported)"
        )
    return True
