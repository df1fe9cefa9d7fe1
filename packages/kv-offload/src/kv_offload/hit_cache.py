"""The last selection stays on the device, so that only what is new has to move."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from kv_offload._checks import check_count, check_indices, check_int64, check_range
from kv_offload._pending import Lane, PendingRows
from kv_offload._resident import Resident
from kv_offload.store import TieredStore


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

    _resident: Resident
    _pending: PendingRows | None

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
    def store(self) -> TieredStore:
        """The store that is asked for misses."""
        return self._store

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
    def counts(self) -> dict[str, int]:
        """What the figures above are made of, for `resume`."""
        return {
            "requested": self._requested,
            "misses": self._misses,
            "prefetched": self._prefetched,
        }

    def resume(self, counts: Mapping[str, int]) -> None:
        """Count on from the `counts` of another cache, as after the store was saved and loaded.

        Raises:
            ValueError: `counts` holds other figures than `counts` gives.
        """
        if counts.keys() != self.counts.keys():
            raise ValueError(f"counts holds {sorted(counts)}, wanted {sorted(self.counts)}")
        self._requested = counts["requested"]
        self._misses = counts["misses"]
        self._prefetched = counts["prefetched"]

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the resident rows and of the ids by which they are found."""
        return self._resident.nbytes

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
        self._misses += self._resident.advance(ids, self._store._open())
        self._requested += self._resident.count
        return self._resident.rows

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
        buffer, resident = self._store._open(), self._resident

        def move() -> Tensor:
            self._prefetched += resident.advance(ids, buffer)
            return resident.rows

        self._pending = self._lane.run(move, ids, buffer.table, *resident.tensors)

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

    # Inside; the store calls the last three.

    def _check(self, indices: Tensor) -> Tensor:
        buffer = self._store._open()
        check_indices(indices, buffer.shape, self._device)
        if indices.shape[2] > self._capacity:
            raise ValueError(
                f"indices asks for {indices.shape[2]} rows per head, wanted at most the "
                f"capacity {self._capacity}"
            )
        check_range(indices, buffer.layout.lengths)
        return indices.to(self._device).contiguous()

    def _await(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _drop(self) -> None:
        """Hold no rows."""
        self._pending = None
        self._resident = Resident(self._store.shape, self._store.dtype, self._device)

    def _follow(self, batch_indices: Tensor) -> None:
        """The store's batch rows have become `batch_indices`; so do the resident ones."""
        self._await()
        self._order = batch_indices.cpu().clone()
        self._resident.reorder(batch_indices.to(self._device))

    def _forget(self, limits: Tensor) -> None:
        """Rows from `limits[b]` on are gone from the store."""
        self._await()
        self._resident.forget(limits.to(self._device))
