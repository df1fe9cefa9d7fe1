"""What a store holds, where, and for how long."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor

from kv_offload._buffer import Buffer, Tier
from kv_offload._checks import TIERS, check_device
from kv_offload._layout import Layout
from kv_offload._pending import Lane
from kv_offload._rows import storage_bytes
from kv_offload.errors import StoreClosedError

if TYPE_CHECKING:
    from kv_offload.hit_cache import HitCache

Store = TypeVar("Store", bound="Held")


class Held:
    """The buffer behind a `TieredStore`: its figures, its lifetime, and its move to another."""

    _buffer: Buffer

    def _set_up(self, device: object, path: str | os.PathLike[str] | None) -> None:
        self._device = check_device(device)
        self._path = Path(path) if path is not None else None
        self._lane = Lane(self._device)
        self._caches: weakref.WeakSet[HitCache] = weakref.WeakSet()
        self._closed = False

    @property
    def shape(self) -> torch.Size:
        """`(B, H, N, D)`, N being the rows held now; the most in a batch row if they differ."""
        return self._open().shape

    @property
    def lengths(self) -> Int64[Tensor, " B"]:
        """Rows per head that each batch row holds now, int64 `[B]` on the CPU."""
        return torch.tensor(self._open().layout.lengths, dtype=torch.int64)

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

    def close(self) -> None:
        """Free the rows and remove the scratch file. Closing twice is fine."""
        if not self._closed:
            for cache in self._caches:
                cache._drop()
            self._closed = True
            self._buffer.close()
            del self._buffer

    def __enter__(self: Store) -> Store:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> Buffer:
        if self._closed:
            raise StoreClosedError("the store is closed")
        return self._buffer

    def _fill(
        self,
        sources: Sequence[Tensor],
        layout: Layout,
        like: Tensor,
        tier: Tier,
        old: Buffer | None = None,
    ) -> Buffer:
        """Fresh storage with `sources[b]`, `[H, N_b, D]`, as batch row b, over the file of `old`.

        `like` gives the dtype and D.
        """
        old_file = old.file if old is not None and tier == "disk" else None
        fresh = Buffer.allocate(
            layout,
            like.shape[-1],
            like.dtype,
            tier=tier,
            device=self._device,
            path=self._path,
            beside=old_file is not None,
        )
        try:
            for b, source in enumerate(sources):
                fresh.held(b).copy_(source)
            if fresh.file is not None:
                fresh.file.release_pages()
                if old_file is not None:
                    fresh.file.replace(old_file)
        except BaseException:
            fresh.close()
            raise
        return fresh

    def _rebuild(self, tier: Tier, rooms: Sequence[int], order: Sequence[int]) -> None:
        """Move batch rows `order` to fresh storage with room for `rooms`.

        The store changes only after all that can fail has been done.
        """
        old = self._buffer
        held = old.layout
        lengths = [held.lengths[b] for b in order]
        layout = Layout(held.heads, lengths, rooms, longest=held.longest)
        self._buffer = self._fill([old.held(b) for b in order], layout, old.rows, tier, old)
        if tier != "disk":
            old.close()
