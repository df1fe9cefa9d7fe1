"""Host memory, pinned where a GPU is to read it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """An uninitialised tensor on the CPU; pageable with a warning where it cannot be pinned.

    A system allows a process to lock so much memory and no more. Pageable memory holds the same
    rows; copies from it to a GPU are slower, and make the host wait.
    """
    if pinned:
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            warnings.warn(
                f"host memory of shape {list(shape)} in {dtype} cannot be pinned, pageable memory "
                f"is used instead and copies from it are slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return torch.empty(shape, dtype=dtype)
