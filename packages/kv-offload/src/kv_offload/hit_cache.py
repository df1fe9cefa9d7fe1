"""The last selection stays on the device, so that only what is new has to move."""

from __future__ import annotations

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from kv_offload._checks import check_count, check_indices, check_int64, check_range
from kv_offload._pending import Lane, PendingRows
from kv_offload._rows import as_words, from_words, storage_bytes
from kv_offload.store import TieredStore

# Stand where ids are kept in order for -1 and for a row the store dropped. No row has such an id,
# and both sort last.
_SKIPPED = torch.iinfo(torch.int64).max
_GONE = _SKIPPED - 1


class HitCache:
    """Rows of the last selection, kept on the device: `fetch(i) == store.gather(i)`, bit for bit.

    Each `fetch` takes the rows that the last one had from there and moves only the misses; its
    result then takes their place. Selections of consecutive decoding steps overlap by 60% and
    more (ShadowKV, section 4.2), which is what this saves. `select_rows` and `truncate` of the
    store reach the caches over it; rows appended need nothing.

    Args:
        store: the store that is asked for misses. Closing it closes the cache.
        capacity: the largest K of a selection, in rows per head.

    Raises:
        TypeError: `store` is no `TieredStore`, or `capacity` no int.
        ValueError: `capacity` is not positive.
    """

    def __init__(self, store: TieredStore, capacity: int) -> None:
        if not isinstance(store, TieredStore):
            raise TypeError(f"store is {store!r}, wanted a TieredStore")
        check_count("capacity", capacity)
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, wanted at least 1 row per head")
        self._device = store.device
        self._store = store
        self._capacity = capacity
        self._row_bytes = store.shape[3] * store.dtype.itemsize
        self._lane = Lane(store.device)
        self._pending: PendingRows | None = None
        self._order: Tensor | None = None
        self.reset()
        store._caches.add(self)

    def reset(self) -> None:
        """Let the resident rows go and set the counters to zero."""
        self._drop()
        self._requested = 0
        self._misses = 0
        self._prefetched = 0

    @property
    def capacity(self) -> int:
        """The largest K of a selection, in rows per head."""
        return self._capacity

    @property
    def hits(self) -> int:
        """Rows that `fetch` found on the device. hits + misses = ids asked for, -1 not counted."""
        return self._requested - self._misses

    @property
    def misses(self) -> int:
        """Rows that `fetch` had to move."""
        return self._misses

    @property
    def prefetched(self) -> int:
        """Rows that `prefetch` moved."""
        return self._prefetched

    @property
    def bytes_moved(self) -> int:
        """Bytes taken from the store: (misses + prefetched) * D * bytes per element."""
        return (self._misses + self._prefetched) * self._row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the resident rows and of the ids by which they are found."""
        slots = [] if self._slots is None else [self._slots]
        return storage_bytes(self._rows, self._keys, self._wanted, *slots)

    @torch.no_grad()
    def fetch(self, indices: Int64[Tensor, "B H K"]) -> Shaped[Tensor, "B H K D"]:
        """Rows in the order of `indices`: `rows[b, h, k] = store[b, h, indices[b, h, k]]`.

        The result is also what stays resident: read it, do not write into it. It stays as it is
        through later calls.

        Args:
            indices: int64 `[B, H, K]` with K up to `capacity`, on the CPU or the store's device,
                each in `[-1, N)`; -1 is skipped and gives a row of zeros. K may change from call
                to call. Ascending ids (-1 last) are fastest; any order and repeats are allowed.

        Returns:
            `[B, H, K, D]` on the store's device, in the store's dtype.

        Raises:
            TypeError, ValueError: as for `TieredStore.gather`, or K is above `capacity`. The
                resident rows and the counters are as before then.
            StoreClosedError: the store is closed.
        """
        ids = self._check(indices)
        self._await()
        self._misses += self._advance(ids)
        self._requested += self._present
        return from_words(self._rows, (*ids.shape, self._rows.shape[1]), self._store.dtype)

    @torch.no_grad()
    def prefetch(self, indices: Int64[Tensor, "B H K"]) -> None:
        """Make `indices`, a guess at the next selection, resident ahead of `fetch`.

        On CUDA the rows move on a stream of their own while the device computes, and the next
        `fetch` waits for them there; on the CPU they move at once. What a wrong guess leaves out
        is fetched as usual, so the rows are right either way. Counted in `prefetched`.

        Args and errors: as for `fetch`.
        """
        ids = self._check(indices)
        self._await()
        slots = [] if self._slots is None else [self._slots]

        def move() -> Tensor:
            self._prefetched += self._advance(ids)
            return self._rows

        self._pending = self._lane.run(move, ids, self._rows, self._keys, self._wanted, *slots)

    @torch.no_grad()
    def select_rows(self, batch_indices: Int64[Tensor, " B2"]) -> None:
        """Confirm that the store, and so this cache, was last re-ordered by `batch_indices`.

        `TieredStore.select_rows` re-orders the caches over it too. This call changes nothing and
        fails where the cache would otherwise be taken for re-ordered when it is not.

        Raises:
            ValueError: the store's last `select_rows` was another one, or there was none.
            StoreClosedError: the store is closed.
        """
        self._store._open()
        check_int64("batch_indices", batch_indices)
        if self._order is None or not torch.equal(self._order, batch_indices.cpu()):
            raise ValueError(
                f"batch_indices is {batch_indices.tolist()}, wanted those of the store's last "
                f"select_rows, {None if self._order is None else self._order.tolist()}: call "
                "TieredStore.select_rows first"
            )

    # Inside.

    def _check(self, indices: Tensor) -> Tensor:
        check_indices(indices, self._store._open().rows, self._device)
        if indices.shape[2] > self._capacity:
            raise ValueError(
                f"indices asks for {indices.shape[2]} rows per head, wanted at most the "
                f"capacity {self._capacity}"
            )
        check_range(indices, self._store.shape[2])
        return indices.to(self._device)

    def _await(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _drop(self) -> None:
        """Hold no rows."""
        self._pending = None
        batch, heads, _, width = self._store.shape
        row = torch.empty((1, width), dtype=self._store.dtype, device=self._device)
        self._rows = as_words(row)[:0].clone()
        self._keys = torch.empty((batch, heads, 0), dtype=torch.int64, device=self._device)
        self._wanted = self._keys
        self._slots: Tensor | None = None
        self._present = 0

    def _advance(self, ids: Tensor) -> int:
        """Make the rows of `ids` the resident ones; the number of rows that had to move."""
        absent = ids == -1
        wanted = ids.masked_fill(absent, _SKIPPED)
        if torch.equal(wanted, self._wanted):
            return 0
        slots, hit = self._match(ids)
        skipped = absent.view(-1).nonzero().squeeze(1)
        missing = hit.logical_or_(absent).logical_not_().view(-1).nonzero().squeeze(1)
        heads = missing.div(max(ids.shape[2], 1), rounding_mode="floor")
        moved = self._store._buffer.read(heads, ids.reshape(-1)[missing])
        if missing.shape[0] == ids.numel():
            rows = moved
        else:
            if self._rows.shape[0]:
                rows = self._rows.index_select(0, slots.view(-1))
            else:
                rows = self._rows.new_empty((ids.numel(), self._rows.shape[1]))
            rows.index_copy_(0, missing, moved)
            rows.index_fill_(0, skipped, 0)
        self._rows = rows
        self._present = ids.numel() - skipped.shape[0]
        self._remember(wanted)
        return missing.shape[0]

    def _match(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where each id is in `_rows`, and whether it is there at all; both `[B, H, K]`."""
        batch, heads, resident = self._keys.shape
        if not resident:
            return ids, torch.zeros_like(ids, dtype=torch.bool)
        place = torch.searchsorted(self._keys, ids).clamp_(max=resident - 1)
        hit = self._keys.gather(-1, place) == ids
        if self._slots is not None:
            place = self._slots.gather(-1, place)
        bases = torch.arange(batch * heads, device=ids.device) * resident
        return place.add_(bases.view(batch, heads, 1)), hit

    def _remember(self, wanted: Tensor) -> None:
        self._wanted = wanted
        if bool((wanted[..., 1:] >= wanted[..., :-1]).all()):
            self._keys, self._slots = wanted, None
        else:
            self._keys, self._slots = wanted.sort(dim=-1)

    def _follow(self, batch_indices: Tensor) -> None:
        """The store's batch rows have become `batch_indices`; so do the resident ones."""
        self._await()
        self._order = batch_indices.cpu().clone()
        order = batch_indices.to(self._device)
        batch, heads, resident = self._keys.shape
        width = self._rows.shape[1]
        if self._rows.shape[0]:
            rows = self._rows.view(batch, heads, resident, width).index_select(0, order)
            self._rows = rows.view(order.shape[0] * heads * resident, width)
        self._keys = self._keys.index_select(0, order)
        self._wanted = self._wanted.index_select(0, order)
        if self._slots is not None:
            self._slots = self._slots.index_select(0, order)
        self._present = int((self._wanted != _SKIPPED).sum())

    def _forget(self, n: int) -> None:
        """Rows from `n` on are gone from the store; ids above it may come back as other rows."""
        self._await()
        self._keys, self._wanted = (
            ids.masked_fill((ids >= n) & (ids != _SKIPPED), _GONE)
            for ids in (self._keys, self._wanted)
        )
