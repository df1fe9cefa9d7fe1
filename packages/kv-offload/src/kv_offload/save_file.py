"""Cache files written: safetensors with a checked header, whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_offload._cache_check import BLANK, FORMAT, FORMAT_VERSION, checksum_at
from kv_offload._checks import check_text
from kv_offload._safetensors import check_storable, header_bytes

_CHUNK = 1 << 22


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
        "method": check_text("method", method),
        "fingerprint": check_text("fingerprint", fingerprint),
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
    _sync_folder(path)


def _ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Wide dtypes first, so that each tensor starts at a multiple of its element size."""
    for name, tensor in tensors.items():
        check_text("a name in tensors", name)
        if name == "__metadata__":
            raise ValueError("tensors holds the name '__metadata__', which safetensors reserves")
        check_storable(f"tensors[{name!r}]", tensor)
    return sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


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


def _sync_folder(path: Path) -> None:
    # Makes the new name survive a power cut. Not every file system has this to offer.
    if os.name != "posix":
        return
    try:
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            text = f"cache saved, but its name may not survive a power cut: {error.strerror}"
            raise OSError(error.errno, text, str(path)) from error
