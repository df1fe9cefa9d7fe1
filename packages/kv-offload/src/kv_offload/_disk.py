"""A scratch safetensors file that a store maps into memory."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import uuid
import weakref
from pathlib import Path

import torch

from kv_offload._safetensors import header_bytes, mapped_tensor

_METADATA = {"format": "kv-offload-scratch"}


class ScratchFile:
    """One new file with one tensor, `rows`, mapped for reading and writing.

    The file belongs to this object: it goes with `close()`, with the last reference or at the
    interpreter's exit, whichever comes first. An existing file is never overwritten.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        header = header_bytes([("rows", dtype, shape)], _METADATA)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        try:
            handle = open(path, "x+b")  # noqa: SIM115 - closed below, before the mapping is used
        except FileExistsError:
            raise _in_use(path) from None
        self._status = os.fstat(handle.fileno())
        self._own(path)
        try:
            with handle:
                handle.write(header)
                handle.flush()
                _reserve(handle.fileno(), len(header), nbytes)
                self._map = mmap.mmap(handle.fileno(), len(header) + nbytes)
        except OSError as error:
            self.close()
            raise OSError(
                error.errno, f"no {nbytes} bytes for the rows: {error.strerror}", str(path)
            ) from error
        except BaseException:
            self.close()
            raise
        self.rows = mapped_tensor(self._map, len(header), shape, dtype)

    def replace(self, old: ScratchFile) -> None:
        """Take over the name of `old`, whose file goes."""
        if old.path.exists() and not _is_at(old.path, old._status):
            raise _in_use(old.path)
        os.replace(self.path, old.path)
        self._finalizer.detach()
        old._finalizer.detach()
        self._own(old.path)

    def _own(self, path: Path) -> None:
        self.path = path
        self._finalizer = weakref.finalize(self, _unlink, path, self._status, os.getpid())

    def release_pages(self) -> None:
        """Stop counting what was just written as this process's memory; the file keeps it."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Remove the file. The mapping goes with the last tensor that views it."""
        self._finalizer()


def scratch_path(path: Path | None, *, beside: bool = False) -> Path:
    """Where the next scratch file goes: `path`, or beside it, or the folder for temporary files."""
    if path is None:
        return Path(tempfile.gettempdir()) / f"kv-offload-{uuid.uuid4().hex}.safetensors"
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp") if beside else path


def _reserve(descriptor: int, offset: int, nbytes: int) -> None:
    # Writing through a map into a hole of a full disk kills the process; asking for the blocks
    # first makes it an error.
    if not nbytes:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, nbytes)
        return
    os.lseek(descriptor, offset, os.SEEK_SET)
    zeros = bytes(1 << 20)
    while nbytes > 0:
        nbytes -= os.write(descriptor, zeros[:nbytes])


def _in_use(path: Path) -> FileExistsError:
    text = "path is in use: a store writes a new file and never over an existing one"
    return FileExistsError(errno.EEXIST, text, str(path))


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Whether `path` still is the file it was, and not another that has taken its name."""
    try:
        return os.path.samestat(os.stat(path), status)
    except FileNotFoundError:
        return False


def _unlink(path: Path, status: os.stat_result, owner: int) -> None:
    # A forked child inherits the object, but the file stays its parent's.
    if os.getpid() == owner and _is_at(path, status):
        path.unlink(missing_ok=True)
