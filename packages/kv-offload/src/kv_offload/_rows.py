"""Rows as plain integers, so that moving them never depends on what a dtype can do."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_words(rows: Tensor) -> Tensor:
    """View contiguous `[..., D]` rows as an integer table `[rows, D]` of the same element size.

    Integers keep every bit (NaN payloads too) and have every indexing kernel, fp8 has not.
    """
    count = rows.numel() // rows.shape[-1] if rows.shape[-1] else rows.shape[:-1].numel()
    return rows.view(_WORDS[rows.element_size()]).view(count, rows.shape[-1])


def from_words(words: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The inverse of `as_words`: the same memory as `dtype`, in `shape`."""
    return words.view(dtype).view(shape)


def storage_bytes(*tensors: Tensor) -> int:
    """Bytes held by the storages behind `tensors`, each storage counted once.

    A view costs nothing on top of its base, and holds all of its base. A tensor on `meta` has no
    memory.

    Args:
        tensors: any shapes, dtypes and devices.

    Returns:
        The sum of `untyped_storage().nbytes()` over the distinct storages, in bytes.

    Raises:
        TypeError: an argument is no tensor.
    """
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"storage_bytes takes tensors, got {tensor!r}")
        storage = tensor.untyped_storage()
        if not tensor.is_meta:
            place = str(storage.device), storage.data_ptr()
            sizes[place] = max(storage.nbytes(), sizes.get(place, 0))
    return sum(sizes.values())
