"""Room for rows on one tier, and the moving of rows out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kv_offload._checks import check_range
from kv_offload._disk import ScratchFile, scratch_path
from kv_offload._rows import as_words, from_words

Tier = Literal["device", "host", "disk"]


class Buffer:
    """`rows [B, H, room, D]` on `tier`; what is read from them goes to `device`."""

    def __init__(
        self, rows: Tensor, tier: Tier, device: torch.device, file: ScratchFile | None = None
    ) -> None:
        batch, heads, room, _ = rows.shape
        self.rows = rows
        self.tier: Tier = tier
        self.file = file
        # Mapped rows without a file of our own belong to somebody else: never written to.
        self.read_only = tier == "disk" and file is None
        self.room = 0 if self.read_only else room
        self._device = device
        self._table = as_words(rows)
        starts = torch.arange(batch * heads, device=rows.device) * room
        self._starts = starts.view(batch, heads, 1)

    @classmethod
    def allocate(
        cls,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        *,
        tier: Tier,
        device: torch.device,
        path: Path | None,
        beside: bool,
    ) -> Buffer:
        """A fresh buffer; on disk in the file `path`, or in a new one beside it."""
        # Buffers outlive the call: as inference tensors they could not be written to later.
        with torch.inference_mode(False):
            if tier == "device":
                return cls(torch.empty(shape, dtype=dtype, device=device), tier, device)
            if tier == "host":
                pinned = torch.cuda.is_available()
                return cls(torch.empty(shape, dtype=dtype, pin_memory=pinned), tier, device)
            file = ScratchFile(scratch_path(path, beside=beside), shape, dtype)
            return cls(file.rows, tier, device, file)

    def close(self) -> None:
        """Remove the scratch file, if there is one."""
        if self.file is not None:
            self.file.close()

    def gather(self, indices: Tensor, length: int, out: Tensor | None) -> Tensor:
        """`out[b, h, k] = rows[b, h, indices[b, h, k]]`, -1 skipped, of the first `length` rows."""
        if out is not None and not out.is_contiguous():
            return out.copy_(self.gather(indices, length, out.contiguous()))
        if self._table.device.type != "cpu":
            return self._gather_masked(indices, length, out)
        indices = indices.cpu()
        skips = check_range(indices, length) < 0
        shape = (*indices.shape, self.rows.shape[3])
        flat = (indices + self._starts).view(-1)
        if not skips:
            if out is None:
                return from_words(self.take(flat), shape, self.rows.dtype)
            self.take(flat, out=as_words(out))
            return out
        if out is None:
            out = torch.zeros(shape, dtype=self.rows.dtype, device=self._device)
        wanted = (indices >= 0).view(-1).nonzero().squeeze(1)
        as_words(out).index_copy_(0, wanted.to(self._device), self.take(flat[wanted]))
        return out

    def _gather_masked(self, indices: Tensor, length: int, out: Tensor | None) -> Tensor:
        """`gather` that never waits for the device: skips are masked instead of counted."""
        if indices.device.type == "cpu":
            check_range(indices, length)
            indices = indices.to(self._device)
        else:
            torch._assert_async(
                ((indices >= -1) & (indices < length)).all(),
                f"indices out of range, wanted -1 (skip) or a row below {length}",
            )
        shape = (*indices.shape, self.rows.shape[3])
        if out is None:
            out = torch.zeros(shape, dtype=self.rows.dtype, device=self._device)
        if not self._table.shape[0]:
            return out
        words = as_words(out)
        rows = self._table.index_select(0, (indices.clamp_min(0) + self._starts).view(-1))
        words.copy_(torch.where((indices >= 0).view(-1, 1), rows, words))
        return out

    def read(self, heads: Tensor, ids: Tensor) -> Tensor:
        """Words `[M, D]`, on `device`, of rows `ids[m]` of the heads `heads[m] = b * H + h`."""
        return self.take(heads * self.rows.shape[2] + ids)

    def take(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Words, on `device`, of the rows `flat` of the whole table: the one place rows move."""
        flat = flat.to(self._table.device)
        if self._table.device == self._device:
            if out is None:
                return self._table.index_select(0, flat)
            return torch.index_select(self._table, 0, flat, out=out)
        pinned = self._device.type == "cuda"
        shape = (flat.shape[0], self._table.shape[1])
        staged = torch.empty(shape, dtype=self._table.dtype, pin_memory=pinned)
        torch.index_select(self._table, 0, flat, out=staged)
        # The allocator of pinned memory keeps `staged` until this copy has ended.
        if out is None:
            return staged.to(self._device, non_blocking=pinned)
        return out.copy_(staged, non_blocking=pinned)
