"""Cache files: safetensors with a checked header, written whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_offload._cache_check import BLANK, FORMAT, FORMAT_VERSION, checksum_at, verify
from kv_offload._checks import check_rows
from kv_offload._safetensors import DTYPE_NAMES, check_storable, header_bytes, mapped_tensor
from kv_offload.errors import CacheFileError, FingerprintError
from kv_offload.store import TieredStore

_CHUNK = 1 << 22
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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


def save_cache(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    method: str,
    fingerprint: str,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `tensors` and what they belong to as one safetensors file, atomically.

    The bytes go to a new file in the same folder, are flushed to the disk, and then take the
    place of `path` in one step. Whatever stops the write, `path` is the old file or the new one.
    The checksum is the SHA-256 of the whole file, the checksum itself written as zeros.

    Args:
        path: the file; an existing one is replaced.
        tensors: by name; any shapes and devices; bool, integer, fp8, fp16, bf16, fp32 or fp64.
        method: name of the method that made the cache.
        fingerprint: identifies the model; `load_cache` can insist on it.
        extra: anything JSON gives back unchanged (no tuples, keys are strings, no NaN).

    Raises:
        TypeError: a tensor, name or header field of the wrong type.
        ValueError: a name that safetensors reserves, or `extra` that JSON would change.
        OSError: the file cannot be written; an old file at `path` is as it was.
    """
    path = Path(path)
    entries = _ordered(tensors)
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "method": _text("method", method),
        "fingerprint": _text("fingerprint", fingerprint),
        "extra": _json(extra),
        "checksum": f"sha256:{BLANK}",
    }
    header = header_bytes(((n, t.dtype, tuple(t.shape)) for n, t in entries), metadata)
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(fresh, "xb") as file:
            digest = hashlib.sha256(header)
            file.write(header)
            for _, tensor in entries:
                for chunk in _chunks(tensor):
                    digest.update(chunk)
                    file.write(chunk)
            file.seek(checksum_at(header))
            file.write(digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        _discard(fresh)
        reason = error.strerror or str(error)
        raise OSError(
            error.errno, f"cache not saved, what was at path is as it was: {reason}", str(path)
        ) from error
    except BaseException:
        _discard(fresh)
        raise
    _sync_folder(path.parent)


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
        _text("fingerprint", fingerprint)
    with open(path, "rb") as file:
        header, start = verify(file, path)
        # Mapped through the file that was checked, whatever has the name by now; private, so that
        # a tensor written to does not change the file.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    metadata = header.pop("__metadata__")
    if fingerprint is not None and metadata["fingerprint"] != fingerprint:
        raise FingerprintError(
            f"{path} was made for the model {metadata['fingerprint']!r}, wanted {fingerprint!r}"
        )
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CacheFileError(f"{path} has {name!r} in dtype {entry['dtype']}, unknown here")
        shape, offset = tuple(entry["shape"]), start + entry["data_offsets"][0]
        tensors[name] = mapped_tensor(mapping, offset, shape, _DTYPES[entry["dtype"]])
    extra = json.loads(metadata["extra"])
    return CacheFile(tensors, metadata["method"], metadata["fingerprint"], extra)


def _ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Wide dtypes first, so that each tensor starts at a multiple of its element size."""
    for name, tensor in tensors.items():
        _text("a name in tensors", name)
        if name == "__metadata__":
            raise ValueError("tensors holds the name '__metadata__', which safetensors reserves")
        check_storable(f"tensors[{name!r}]", tensor)
    return sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, wanted a str")
    return value


def _json(extra: Mapping[str, Any] | None) -> str:
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra is {extra!r}, wanted a mapping")
    extra = {} if extra is None else dict(extra)
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"extra is {extra!r}, wanted JSON: {error}") from error
    if json.loads(text) != extra:
        raise ValueError(f"extra is {extra!r}, which JSON would change to {json.loads(text)!r}")
    return text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` in pieces, each valid until the next is asked for."""
    # A single element counts as contiguous whatever its stride, but only stride 1 views as bytes.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for begin in range(0, flat.shape[0], _CHUNK):
        part = flat[begin : begin + _CHUNK].cpu()
        yield memoryview((ctypes.c_char * part.shape[0]).from_address(part.data_ptr()))


def _discard(fresh: Path) -> None:
    # Whatever kept it from being written may keep it from being removed; that error comes first.
    with suppress(OSError):
        fresh.unlink()


def _sync_folder(folder: Path) -> None:
    # Makes the new name survive a power cut. Not every file system has this to offer.
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
