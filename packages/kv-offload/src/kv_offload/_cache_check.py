"""What a cache file must pass before anything of it is used."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from kv_offload._safetensors import DTYPE_NAMES, LONGEST_HEADER
from kv_offload.errors import (
    AlteredFileError,
    CacheFileError,
    ForeignFileError,
    NewerFormatError,
    TruncatedFileError,
)

FORMAT = "kv-offload-cache"
FORMAT_VERSION = 1
BLANK = "0" * 64

_CHUNK = 1 << 22
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# JSON escapes quotes inside strings, so these bytes are nowhere else in a header.
_BEFORE_CHECKSUM = b'"checksum":"sha256:'


def checksum_at(header: bytes) -> int:
    """Where the 64 hexadecimal digits of the checksum start; -1 if there are none."""
    start = header.find(_BEFORE_CHECKSUM)
    return start if start < 0 else start + len(_BEFORE_CHECKSUM)


class Header(NamedTuple):
    """What the header of a cache file says.

    tensors: `(dtype, shape, offset)` by name, the offset in bytes from the start of the file.
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    method: str
    fingerprint: str
    extra: dict[str, Any]


def verify(file: BinaryIO, path: Path) -> Header:
    """The header of a file that is whole, unaltered, of a known version and consistent.

    Raises one of the `CacheFileError`s that says what is wrong.
    """
    raw = _read_header(file, path)
    header = _parse(raw, path)
    _check_size(header, len(raw), os.fstat(file.fileno()).st_size, path)
    _check_sum(raw, file, path)
    return _read(header, len(raw), path)


def _read_header(file: BinaryIO, path: Path) -> bytes:
    """Length prefix and JSON, unchecked."""
    prefix = file.read(9)
    if len(prefix) < 9:
        raise TruncatedFileError(f"{path} has {len(prefix)} bytes, too few for a cache file")
    length = int.from_bytes(prefix[:8], "little")
    if prefix[8:] != b"{" or not 0 < length <= LONGEST_HEADER:
        raise ForeignFileError(f"{path} is no cache file: it does not start as safetensors does")
    raw = prefix + file.read(length - 1)
    if len(raw) < 8 + length:
        raise TruncatedFileError(f"{path} ends inside its header")
    return raw


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    """The header as JSON, after a check of who wrote it and with which version."""
    try:
        header: dict[str, Any] = json.loads(raw[8:])
        metadata = header["__metadata__"]
        name, version = metadata["format"], metadata["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if FORMAT.encode() in raw:
            raise AlteredFileError(f"{path} has a header that cannot be read") from error
        raise ForeignFileError(f"{path} was not written by save_cache") from error
    if name != FORMAT:
        raise ForeignFileError(f"{path} has format {name!r}, wanted {FORMAT!r}")
    if not isinstance(version, str) or not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise AlteredFileError(f"{path} has format version {version!r}, wanted a number")
    if int(version) > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path} has format version {version}, this kv-offload reads up to {FORMAT_VERSION}: "
            "update it"
        )
    return header


def _check_size(header: dict[str, Any], length: int, size: int, path: Path) -> None:
    try:
        ends = [header[name]["data_offsets"][1] for name in header if name != "__metadata__"]
        wanted = length + max(ends, default=0)
        missing, spare = size < wanted, size > wanted
    except (KeyError, TypeError, IndexError) as error:
        raise AlteredFileError(f"{path} has a header that cannot be read") from error
    if missing:
        raise TruncatedFileError(f"{path} has {size} bytes, its header says {wanted}")
    if spare:
        raise AlteredFileError(f"{path} has {size} bytes, its header says {wanted}")


def _check_sum(raw: bytes, file: BinaryIO, path: Path) -> None:
    start = checksum_at(raw)
    if start < 0:
        raise AlteredFileError(f"{path} has no checksum")
    end = start + len(BLANK)
    digest = hashlib.sha256(raw[:start] + BLANK.encode() + raw[end:])
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    if digest.hexdigest().encode() != raw[start:end]:
        raise AlteredFileError(f"{path} does not match its checksum: its bytes have changed")


def _read(header: dict[str, Any], start: int, path: Path) -> Header:
    """The fields of a header whose bytes are those that were written, `start` bytes long.

    A checksum anybody can compute: whoever wrote the bytes may have written nonsense.
    """
    try:
        metadata = header.pop("__metadata__")
        tensors = {name: _read_entry(entry, start) for name, entry in header.items()}
        method, fingerprint = metadata["method"], metadata["fingerprint"]
        extra = json.loads(metadata["extra"])
        if not (
            isinstance(extra, dict) and isinstance(method, str) and isinstance(fingerprint, str)
        ):
            raise TypeError("a field of the wrong type")
    except CacheFileError as error:
        raise CacheFileError(f"{path} {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AlteredFileError(f"{path} has a header that cannot be read: {error!r}") from error
    return Header(tensors, method, fingerprint, extra)


def _read_entry(entry: dict[str, Any], start: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if name not in _DTYPES:
        raise CacheFileError(f"holds the dtype {name}, unknown here")
    dtype = _DTYPES[name]
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"sizes {entry}")
    largest = math.prod(max(size, 1) for size in shape) * dtype.itemsize
    if end - begin != math.prod(shape) * dtype.itemsize or largest >= 1 << 63:
        raise ValueError(f"sizes {entry}")
    return dtype, shape, start + begin
