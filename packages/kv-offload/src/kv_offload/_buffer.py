"""Room for rows on one tier, and the moving of rows into it and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kv_offload._checks import check_range
from kv_offload._disk import ScratchFile, scratch_path
from kv_offload._host import empty_on_host
from kv_offload._layout import Layout
from kv_offload._rows import as_words, from_words

Tier = Literal["device", "host", "disk"]


class Buffer:
    """`rows [total, D]` on `tier`, found by `layout`; what is read from them goes to `device`."""

    def __init__(
        self,
        rows: Tensor,
        layout: Layout,
        tier: Tier,
        device: torch.device,
        file: ScratchFile | None = None,
    ) -> None:
        self.rows = rows
        self.layout = layout.to(rows.device)
        self.tier: Tier = tier
        self.file = file
        # Mapped rows without a file of our own belong to somebody else: never written to.
        self.read_only = tier == "disk" and file is None
        self.table = as_words(rows)
        self.starts = layout.starts.to(device)
        self._device = device

    @classmethod
    def allocate(
        cls,
        layout: Layout,
        width: int,
        dtype: torch.dtype,
        *,
        tier: Tier,
        device: torch.device,
        path: Path | None,
        beside: bool,
    ) -> Buffer:
        """A fresh buffer; on disk in the file `path`, or in a new one beside it."""
        shape = (layout.total, width)
        # Buffers outlive the call: as inference tensors they could not be written to later.
        with torch.inference_mode(False):
            if tier == "device":
                return cls(torch.empty(shape, dtype=dtype, device=device), layout, tier, device)
            if tier == "host":
                rows = empty_on_host(shape, dtype, pinned=torch.cuda.is_available())
                return cls(rows, layout, tier, device)
            file = ScratchFile(scratch_path(path, beside=beside), shape, dtype)
            return cls(file.rows, layout, tier, device, file)

    @property
    def shape(self) -> torch.Size:
        """`(B, H, N, D)`, N being the rows of the longest batch row."""
        layout = self.layout
        sizes = (len(layout.lengths), layout.heads, layout.longest, self.rows.shape[1])
        return torch.Size(sizes)

    def close(self) -> None:
        """Remove the scratch file, if there is one."""
        if self.file is not None:
            self.file.close()

    # Rows in.

    def batch_row(self, b: int) -> Tensor:
        """`[H, room, D]`, the part of the table that batch row `b` has; a view."""
        layout = self.layout
        part = self.rows[layout.first[b] : layout.first[b + 1]]
        return part.view(layout.heads, layout.rooms[b], part.shape[1])

    def held(self, b: int) -> Tensor:
        """`[H, N_b, D]`, the rows that batch row `b` holds; a view."""
        return self.batch_row(b)[:, : self.layout.lengths[b]]

    def has_room(self, lengths: Sequence[int]) -> bool:
        """Whether `lengths[b]` rows can be held without moving to another buffer."""
        fits = all(n <= room for n, room in zip(lengths, self.layout.rooms, strict=True))
        return fits and not self.read_only

    def grown(self, lengths: Sequence[int]) -> list[int]:
        """Rooms of the buffer to move to when there is no room for `lengths`."""
        return list(lengths) if self.read_only else self.layout.grown(lengths)

    def append(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Add the first `counts[b]` of `rows[b]`, `rows` being `[B, H, n, D]`; there is room."""
        layout = self.layout
        ends = [length + n for length, n in zip(layout.lengths, counts, strict=True)]
        rows = rows.to(self.rows.device)
        if layout.even and len(set(counts)) == 1:
            whole = self.rows.view(len(counts), layout.heads, layout.rooms[0], rows.shape[3])
            whole[:, :, layout.lengths[0] : ends[0]].copy_(rows[:, :, : counts[0]])
        else:
            for b, (begin, end) in enumerate(zip(layout.lengths, ends, strict=True)):
                self.batch_row(b)[:, begin:end].copy_(rows[b, :, : end - begin])
        layout.set(ends, longest=layout.longest + rows.shape[2])

    # Rows out.

    def gather(self, indices: Tensor, out: Tensor | None) -> Tensor:
        """`out[b, h, k]` = row `indices[b, h, k]` of batch row b and head h, -1 skipped."""
        if out is not None and not out.is_contiguous():
            return out.copy_(self.gather(indices, out.contiguous()))
        if self.table.device.type != "cpu":
            return self._gather_masked(indices, out)
        indices = indices.cpu()
        some_skipped = check_range(indices, self.layout.lengths) < 0
        flat = (indices + self.layout.starts).reshape(-1)
        shape = (*indices.shape, self.rows.shape[1])
        if not some_skipped:
            if out is None:
                return from_words(self.take(flat), shape, self.rows.dtype)
            self.take(flat, out=as_words(out))
            return out
        skips = (indices < 0).reshape(-1)
        if out is None and self._device == self.table.device and self.table.shape[0]:
            # Some row for each skip and zeros over it: less work than to put the others in place.
            words = self.take(flat.masked_fill_(skips, 0))
            words.index_fill_(0, skips.nonzero().squeeze(1), 0)
            return from_words(words, shape, self.rows.dtype)
        if out is None:
            out = torch.zeros(shape, dtype=self.rows.dtype, device=self._device)
        wanted = skips.logical_not_().nonzero().squeeze(1)
        as_words(out).index_copy_(0, wanted.to(self._device), self.take(flat[wanted]))
        return out

    def _gather_masked(self, indices: Tensor, out: Tensor | None) -> Tensor:
        """`gather` that never waits for the device: skips are masked instead of counted."""
        if indices.device.type == "cpu":
            check_range(indices, self.layout.lengths)
            indices = indices.to(self._device)
        else:
            torch._assert_async(
                ((indices >= -1) & (indices < self.layout.limits)).all(),
                f"indices out of range, wanted -1 (skip) or a row below {self.layout.lengths}",
            )
        shape = (*indices.shape, self.rows.shape[1])
        if out is None:
            out = torch.zeros(shape, dtype=self.rows.dtype, device=self._device)
        if not self.table.shape[0]:
            return out
        words = as_words(out)
        skips = (indices < 0).reshape(-1)
        flat = (indices + self.layout.starts).reshape(-1).masked_fill_(skips, 0)
        words.copy_(torch.where(skips[:, None], words, self.table.index_select(0, flat)))
        return out

    def take(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Words, on `device`, of the rows `flat` of the table: the one place rows move."""
        flat = flat.to(self.table.device)
        if self.table.device == self._device:
            if out is None:
                return self.table.index_select(0, flat)
            return torch.index_select(self.table, 0, flat, out=out)
        shape = (flat.shape[0], self.table.shape[1])
        staged = empty_on_host(shape, self.table.dtype, pinned=self._device.type == "cuda")
        torch.index_select(self.table, 0, flat, out=staged)
        # The allocator of pinned memory keeps `staged` until this copy has ended.
        pinned = self._device.type == "cuda" and staged.is_pinned()
        if out is None:
            return staged.to(self._device, non_blocking=pinned)
        return out.copy_(staged, non_blocking=pinned)
