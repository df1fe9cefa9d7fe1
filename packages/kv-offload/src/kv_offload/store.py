"""Rows of a KV cache on one tier of memory, handed out by index."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from kv_offload._buffer import Buffer, Tier
from kv_offload._checks import (
    TIERS,
    check_batch_indices,
    check_count,
    check_indices,
    check_out,
    check_rows,
    check_tier,
)
from kv_offload._pending import Lane, PendingRows
from kv_offload._rows import storage_bytes
from kv_offload.errors import StoreClosedError

if TYPE_CHECKING:
    from kv_offload.hit_cache import HitCache


class TieredStore:
    """`[B, H, N, D]` rows held on one tier; `gather(i)[b, h, k] == rows[b, h, i[b, h, k]]`.

    The store copies `tensor` into storage of its own, so the caller's may go. Rows come back
    with the same bits whatever the tier. Tiers:

    - `device`: memory of `device`;
    - `host`: CPU memory, pinned where CUDA is available;
    - `disk`: a memory-mapped safetensors file, removed when the rows leave the disk or the store
      is closed. Use `save_cache` for a file that stays.

    SentenceKV (section 3) and ShadowKV (Algorithm 1) keep what is retrieved this way.

    Args:
        tensor: `[B, H, N, D]`, bool, integer, fp8, fp16, bf16, fp32 or fp64. Detached.
        tier: where the rows are held.
        device: where gathered rows go; the tensor's own device by default.
        path: name of the file while the tier is `disk`; it must not exist. By default a new file
            in the folder for temporary files, which on some systems is memory, not disk.

    Raises:
        TypeError: `tensor` is no tensor or has a dtype that cannot be stored.
        ValueError: `tensor` is not 4-dimensional, or `tier` is none of the three.
        OSError: the file cannot be made (`FileExistsError`: `path` is in use).
    """

    @torch.no_grad()
    def __init__(
        self,
        tensor: Shaped[Tensor, "B H N D"],
        *,
        tier: Tier = "device",
        device: torch.device | str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        check_rows("tensor", tensor)
        check_tier(tier)
        self._set_up(tensor, device, path)
        self._buffer = self._copy_of(tensor, tier, tensor.shape[2], None)

    @classmethod
    def _over(
        cls,
        rows: Tensor,
        *,
        device: torch.device | str | None,
        path: str | os.PathLike[str] | None,
    ) -> TieredStore:
        """A store on tier `disk` over mapped `rows`, which it reads and never writes."""
        store = cls.__new__(cls)
        store._set_up(rows, device, path)
        store._buffer = Buffer(rows, "disk", store._device)
        return store

    def _set_up(
        self,
        tensor: Tensor,
        device: torch.device | str | None,
        path: str | os.PathLike[str] | None,
    ) -> None:
        self._device = _with_index(torch.device(device) if device is not None else tensor.device)
        self._path = Path(path) if path is not None else None
        self._length = tensor.shape[2]
        self._lane = Lane(self._device)
        self._caches: weakref.WeakSet[HitCache] = weakref.WeakSet()
        self._closed = False

    # What is held, and where.

    @property
    def shape(self) -> torch.Size:
        """`(B, H, N, D)`, N being the rows held now."""
        batch, heads, _, width = self._open().rows.shape
        return torch.Size((batch, heads, self._length, width))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows, the same on every tier."""
        return self._open().rows.dtype

    @property
    def tier(self) -> Tier:
        """Where the rows are held now."""
        return self._open().tier

    @property
    def device(self) -> torch.device:
        """Where gathered rows go."""
        self._open()
        return self._device

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes per tier, of the storages that exist: room kept for later rows counts too."""
        buffer = self._open()
        return {tier: storage_bytes(buffer.rows) * (tier == buffer.tier) for tier in TIERS}

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def __repr__(self) -> str:
        if self._closed:
            return "TieredStore(closed)"
        return (
            f"TieredStore({tuple(self.shape)}, {self.dtype}, "
            f"tier={self.tier!r}, device={str(self._device)!r})"
        )

    # Reading.

    @torch.no_grad()
    def gather(
        self,
        indices: Int64[Tensor, "B H K"],
        *,
        out: Shaped[Tensor, "B H K D"] | None = None,
    ) -> Shaped[Tensor, "B H K D"]:
        """Rows by index: `out[b, h, k] = rows[b, h, indices[b, h, k]]`, on `device`.

        An entry of -1 is skipped: its row is zero in a fresh result and stays as it was in a
        given `out`. Any order and repeats are allowed.

        Args:
            indices: int64 `[B, H, K]` on the CPU or on `device`, each in `[-1, N)`.
            out: `[B, H, K, D]` of the store's dtype on `device`; written and returned.

        Returns:
            `[B, H, K, D]` on `device`, in the store's dtype.

        Raises:
            TypeError: wrong dtype of `indices` or `out`.
            ValueError: wrong shape or device, or an index out of range. Nothing was written then.
                Where rows and indices are both on a CUDA device the range is asserted there, as
                for torch's own indexing, since a check on the host would stall the stream.
            StoreClosedError: the store is closed.
        """
        buffer = self._check(indices, out)
        return buffer.gather(indices, self._length, out)

    @torch.no_grad()
    def gather_async(
        self,
        indices: Int64[Tensor, "B H K"],
        out: Shaped[Tensor, "B H K D"] | None = None,
    ) -> PendingRows:
        """`gather` on a CUDA stream of its own; `.wait()` of the result gives the rows.

        Rows held on the device are gathered on the current stream, and on the CPU the work is
        done at once: same interface, same rows. Do not touch `out` before `wait()`.

        Args and errors: as for `gather`, raised here and not by `wait()`.
        """
        buffer = self._check(indices, out)
        if buffer.tier == "device":
            return PendingRows(buffer.gather(indices, self._length, out))
        used = [indices] if out is None else [indices, out]
        return self._lane.run(lambda: buffer.gather(indices, self._length, out), *used)

    # Changing what is held.

    @torch.no_grad()
    def append(self, rows: Shaped[Tensor, "B H n D"]) -> None:
        """Add rows at the end: N grows by n.

        Room is doubled when it runs out, so N rows added one by one cost O(N) copied rows.

        Args:
            rows: `[B, H, n, D]` of the store's dtype, on any device.

        Raises:
            TypeError: `rows` is no tensor, or of another dtype.
            ValueError: B, H or D differ from the store's.
            OSError: no room on disk; the store is as it was.
            StoreClosedError: the store is closed.
        """
        buffer = self._open()
        check_rows("rows", rows)
        batch, heads, _, width = buffer.rows.shape
        if rows.dtype != buffer.rows.dtype:
            raise TypeError(f"rows has dtype {rows.dtype}, wanted {buffer.rows.dtype}")
        if (rows.shape[0], rows.shape[1], rows.shape[3]) != (batch, heads, width):
            raise ValueError(
                f"rows has shape {tuple(rows.shape)}, wanted ({batch}, {heads}, n, {width})"
            )
        end = self._length + rows.shape[2]
        if end > buffer.room:
            self._rebuild(buffer.tier, max(2 * buffer.room, end))
        self._buffer.rows[:, :, self._length : end].copy_(rows)
        self._length = end

    @torch.no_grad()
    def to_tier(self, tier: Tier) -> None:
        """Move the rows to `tier` (spill or promote). Both copies exist until it is done.

        Raises:
            ValueError: `tier` is none of the three.
            OSError: no room on disk, or `path` is in use; the store is as it was.
            StoreClosedError: the store is closed.
        """
        buffer = self._open()
        check_tier(tier)
        if tier != buffer.tier:
            self._rebuild(tier, self._length)

    @torch.no_grad()
    def select_rows(self, batch_indices: Int64[Tensor, " B2"]) -> None:
        """Keep batch rows `batch_indices`, in that order: `new[i] = old[batch_indices[i]]`.

        Re-orders, repeats and drops rows as beam search does. Hit caches over this store follow.

        Args:
            batch_indices: int64 `[B2]`, each in `[0, B)`, on any device.

        Raises:
            TypeError: not an int64 tensor.
            ValueError: not 1-dimensional, or an index out of range.
            OSError: no room on disk; the store is as it was.
            StoreClosedError: the store is closed.
        """
        buffer = self._open()
        order = check_batch_indices(batch_indices, buffer.rows.shape[0])
        if order != list(range(buffer.rows.shape[0])):
            self._rebuild(buffer.tier, max(buffer.room, self._length), order)
        for cache in self._caches:
            cache._follow(batch_indices)

    def truncate(self, n: int) -> None:
        """Keep the first `n` rows of every head and drop the rest. The room stays.

        Raises:
            TypeError: `n` is no int.
            ValueError: `n` is not in `[0, N]`.
            StoreClosedError: the store is closed.
        """
        self._open()
        check_count("n", n)
        if not 0 <= n <= self._length:
            raise ValueError(f"n is {n}, wanted 0 to {self._length}, the rows held")
        self._length = n
        for cache in self._caches:
            cache._forget(n)

    def close(self) -> None:
        """Free the rows and remove the scratch file. Closing twice is fine."""
        if not self._closed:
            for cache in self._caches:
                cache._drop()
            self._closed = True
            self._buffer.close()
            del self._buffer

    def __enter__(self) -> TieredStore:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Inside.

    def _open(self) -> Buffer:
        if self._closed:
            raise StoreClosedError("the store is closed")
        return self._buffer

    def _check(self, indices: Tensor, out: Tensor | None) -> Buffer:
        buffer = self._open()
        check_indices(indices, buffer.rows, self._device)
        if out is not None:
            check_out(out, indices, buffer.rows, self._device)
        return buffer

    def _copy_of(
        self,
        rows: Tensor,
        tier: Tier,
        room: int,
        old: Buffer | None,
        order: list[int] | None = None,
    ) -> Buffer:
        """Fresh storage on `tier` with the batch rows `order` of `rows`, over the file of `old`."""
        order = list(range(rows.shape[0])) if order is None else order
        old_file = old.file if old is not None and tier == "disk" else None
        fresh = Buffer.allocate(
            (len(order), rows.shape[1], room, rows.shape[3]),
            rows.dtype,
            tier=tier,
            device=self._device,
            path=self._path,
            beside=old_file is not None,
        )
        try:
            for target, source in enumerate(order):
                fresh.rows[target, :, : rows.shape[2]].copy_(rows[source])
            if fresh.file is not None:
                fresh.file.release_pages()
                if old_file is not None:
                    fresh.file.replace(old_file)
        except BaseException:
            fresh.close()
            raise
        return fresh

    def _rebuild(self, tier: Tier, room: int, order: list[int] | None = None) -> None:
        """Move to fresh storage. The store changes only after all that can fail has been done."""
        old = self._buffer
        self._buffer = self._copy_of(old.rows[:, :, : self._length], tier, room, old, order)
        if tier != "disk":
            old.close()


def _with_index(device: torch.device) -> torch.device:
    """`cuda` means the current CUDA device, as tensors there say `cuda:0`."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
