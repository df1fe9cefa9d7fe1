"""Cache files opened: checked whole, then mapped."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_offload._cache_check import verify
from kv_offload._checks import check_rows, check_text
from kv_offload._safetensors import mapped_tensor
from kv_offload.errors import FingerprintError
from kv_offload.store import TieredStore


@dataclass(frozen=True)
class CacheFile:
    """What `load_cache` found.

    Attributes:
        tensors: by name, on the CPU and mapped from the file: a tensor takes memory as it is
            read. Writing into one changes this process's copy, never the file.
        method: the method that made the cache, as given to `save_cache`.
        fingerprint: the model it was made with.
        extra: the JSON-able rest.
    """

    tensors: dict[str, Tensor]
    method: str
    fingerprint: str
    extra: dict[str, Any]

    def store(
        self,
        name: str,
        *,
        device: torch.device | str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> TieredStore:
        """Tensor `name`, `[B, H, N, D]`, as a `TieredStore` on tier `disk`, without a copy.

        The file is only read: rows appended or re-ordered on disk go to a scratch file of the
        store's own (`path`, as for `TieredStore`), and `to_tier` promotes as usual.

        Raises:
            ValueError: no such tensor, or it is not 4-dimensional.
        """
        if name not in self.tensors:
            raise ValueError(f"name is {name!r}, wanted one of {sorted(self.tensors)}")
        check_rows(name, self.tensors[name])
        return TieredStore._over(self.tensors[name], device=device, path=path)


def load_cache(path: str | os.PathLike[str], *, fingerprint: str | None = None) -> CacheFile:
    """Open a file that `save_cache` wrote, after a check of every byte of it.

    The file is read once for the checksum, in pieces, and then mapped: the tensors take no memory
    until they are read. Do not change the file while they are in use (saving over it is safe).

    Args:
        path: the file.
        fingerprint: the model asked for; `None` takes any.

    Returns:
        A `CacheFile`.

    Raises:
        ForeignFileError: not written by `save_cache`.
        TruncatedFileError: the file ends early.
        AlteredFileError: a byte differs from what was written.
        NewerFormatError: of a newer format version.
        FingerprintError: made with another model.
        OSError: the file cannot be read (`FileNotFoundError`: it is not there).
    """
    path = Path(path)
    if fingerprint is not None:
        check_text("fingerprint", fingerprint)
    with open(path, "rb") as file:
        header = verify(file, path)
        if fingerprint is not None and header.fingerprint != fingerprint:
            raise FingerprintError(
                f"{path} was made for the model {header.fingerprint!r}, wanted {fingerprint!r}"
            )
        # Mapped through the file that was checked, whatever has the name by now; private, so that
        # a tensor written to does not change the file.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {
        name: mapped_tensor(mapping, offset, shape, dtype)
        for name, (dtype, shape, offset) in header.tensors.items()
    }
    return CacheFile(tensors, header.method, header.fingerprint, header.extra)
