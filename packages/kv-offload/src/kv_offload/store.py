"""Rows of a KV cache on one tier of memory, handed out by index."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from kv_offload._buffer import Buffer, Tier
from kv_offload._checks import (
    check_batch_indices,
    check_count,
    check_indices,
    check_lengths,
    check_out,
    check_ragged,
    check_rows,
    check_tier,
)
from kv_offload._held import Held
from kv_offload._layout import Layout
from kv_offload._pending import PendingRows


class TieredStore(Held):
    """`[B, H, N, D]` rows held on one tier; `gather(i)[b, h, k] == rows[b, h, i[b, h, k]]`.

    The store copies `tensor` into storage of its own, so the caller's may go. Rows come back
    with the same bits whatever the tier. Tiers:

    - `device`: memory of `device`;
    - `host`: CPU memory, pinned where CUDA is available;
    - `disk`: a memory-mapped safetensors file, removed when the rows leave the disk or the store
      is closed. Use `save_cache` for a file that stays.

    SentenceKV (section 3) and ShadowKV (Algorithm 1) keep what is retrieved this way. Batch rows
    of unequal length: `TieredStore.ragged`.

    Args:
        tensor: `[B, H, N, D]`, bool, integer, fp8, fp16, bf16, fp32 or fp64. Detached.
        tier: where the rows are held.
        device: where gathered rows go; the tensor's own device by default.
        path: name of the file while the tier is `disk`; it must not exist. By default a new file
            in the folder for temporary files, which on some systems is memory, not disk.

    Raises:
        TypeError: `tensor` is no tensor or has a dtype that cannot be stored.
        ValueError: `tensor` is not 4-dimensional, `tier` is none of the three, or torch has no
            such `device`.
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
        self._set_up(tensor.device if device is None else device, path)
        self._buffer = self._fill(list(tensor), _dense(tensor), tensor, tier)

    @classmethod
    @torch.no_grad()
    def ragged(
        cls,
        rows: Sequence[Shaped[Tensor, "H _ D"]],
        *,
        tier: Tier = "device",
        device: torch.device | str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> TieredStore:
        """A store of batch rows of unequal length, none padded: `rows[b]` is `[H, N_b, D]`.

        It is used as any other. Indices of batch row b are in `[-1, N_b)`, `lengths` are the N_b,
        the N of `shape` is the longest, and `nbytes` is `sum(N_b) * H * D * bytes per element`.
        Heads of unequal length are batch rows with H = 1.

        Args:
            rows: one tensor per batch row, alike in H, D and dtype.
            tier, path: as for `TieredStore(tensor)`.
            device: where gathered rows go; that of `rows[0]` by default.

        Raises:
            TypeError, ValueError, OSError: as for `TieredStore(tensor)`, or the rows differ in
                more than their length, or there are none.
        """
        check_ragged(rows)
        check_tier(tier)
        store = cls.__new__(cls)
        store._set_up(rows[0].device if device is None else device, path)
        lengths = [row.shape[1] for row in rows]
        layout = Layout(rows[0].shape[0], lengths, lengths, longest=0)
        store._buffer = store._fill(rows, layout, rows[0], tier)
        return store

    @classmethod
    def _over(
        cls,
        tensor: Tensor,
        *,
        device: torch.device | str | None,
        path: str | os.PathLike[str] | None,
    ) -> TieredStore:
        """A store on tier `disk` over a mapped `tensor`, which it reads and never writes."""
        store = cls.__new__(cls)
        store._set_up(tensor.device if device is None else device, path)
        rows = tensor.view(tensor.shape[:3].numel(), tensor.shape[3])
        store._buffer = Buffer(rows, _dense(tensor), "disk", store._device)
        return store

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
        return self._check(indices, out).gather(indices, out)

    @torch.no_grad()
    def gather_async(
        self,
        indices: Int64[Tensor, "B H K"],
        *,
        out: Shaped[Tensor, "B H K D"] | None = None,
    ) -> PendingRows:
        """`gather` on a CUDA stream of its own; `.wait()` of the result gives the rows.

        Rows held on the device are gathered on the current stream, and on the CPU the work is
        done at once: same interface, same rows. Do not touch `out` before `wait()`. Give indices
        on the CPU where there are any: the host reads them and waits for those on the device.

        Args and errors: as for `gather`, raised here and not by `wait()`.
        """
        buffer = self._check(indices, out)
        if buffer.tier == "device":
            return PendingRows(buffer.gather(indices, out))
        used = [indices] if out is None else [indices, out]
        return self._lane.run(lambda: buffer.gather(indices, out), *used)

    @torch.no_grad()
    def append(
        self,
        rows: Shaped[Tensor, "B H n D"],
        *,
        lengths: Int64[Tensor, " B"] | None = None,
    ) -> None:
        """Add rows at the end: N grows by n.

        Room is doubled when it runs out, so N rows added one by one cost O(N) copied rows.

        Args:
            rows: `[B, H, n, D]` of the store's dtype, on any device.
            lengths: int64 `[B]`, each in `[0, n]`: batch row b gets only the first `lengths[b]`
                of its n rows. Read on the host. By default all n.

        Raises:
            TypeError: `rows` is no tensor, or of another dtype; `lengths` is not int64.
            ValueError: B, H or D differ from the store's; a length is out of range.
            OSError: no room on disk; the store is as it was.
            StoreClosedError: the store is closed.
        """
        buffer = self._open()
        check_rows("rows", rows)
        batch, heads, _, width = buffer.shape
        if rows.dtype != buffer.rows.dtype:
            raise TypeError(f"rows has dtype {rows.dtype}, wanted {buffer.rows.dtype}")
        if (rows.shape[0], rows.shape[1], rows.shape[3]) != (batch, heads, width):
            raise ValueError(
                f"rows has shape {tuple(rows.shape)}, wanted ({batch}, {heads}, n, {width})"
            )
        counts = [rows.shape[2]] * batch
        if lengths is not None:
            counts = check_lengths("lengths", lengths, counts)
        ends = [held + n for held, n in zip(buffer.layout.lengths, counts, strict=True)]
        if any(counts) and not buffer.has_room(ends):
            self._rebuild(buffer.tier, buffer.grown(ends), range(batch))
        self._buffer.append(rows, counts)

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
            lengths = buffer.layout.lengths
            self._rebuild(tier, lengths, range(len(lengths)))

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
        batch = buffer.shape[0]
        order = check_batch_indices(batch_indices, batch)
        if order != list(range(batch)):
            self._rebuild(buffer.tier, [buffer.layout.rooms[b] for b in order], order)
        for cache in self._caches:
            cache._follow(batch_indices)

    @torch.no_grad()
    def truncate(self, n: int | Int64[Tensor, " B"]) -> None:
        """Keep the first `n` rows of every head and drop the rest. The room stays.

        Args:
            n: in `[0, N]`; a shorter batch row keeps all it has. Or int64 `[B]`, `n[b]` in
                `[0, lengths[b]]` for batch row b, read on the host.

        Raises:
            TypeError: `n` is no int and no int64 tensor.
            ValueError: `n` is out of range.
            StoreClosedError: the store is closed.
        """
        layout = self._open().layout
        if isinstance(n, Tensor):
            kept = check_lengths("n", n, layout.lengths)
            layout.set(kept, longest=layout.longest)
        else:
            check_count("n", n)
            if not 0 <= n <= layout.longest:
                raise ValueError(f"n is {n}, wanted 0 to {layout.longest}, the rows held")
            layout.set([min(n, length) for length in layout.lengths], longest=n)
        for cache in self._caches:
            cache._forget(layout.limits)

    def _check(self, indices: Tensor, out: Tensor | None) -> Buffer:
        buffer = self._open()
        check_indices(indices, buffer.shape, self._device)
        if out is not None:
            check_out(out, indices, buffer.rows.shape[1], buffer.rows.dtype, self._device)
        return buffer


def _dense(tensor: Tensor) -> Layout:
    """The layout of `[B, H, N, D]` as it is."""
    batch, heads, length, _ = tensor.shape
    return Layout(heads, [length] * batch, [length] * batch, longest=length)
