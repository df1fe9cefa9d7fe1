"""Rows of one selection on the device, found by their ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_offload._buffer import Buffer
from kv_offload._rows import as_words, from_words, storage_bytes

# Stand where ids are kept in order for -1 and for a row the store dropped. No row has such an id,
# and both sort last.
_SKIPPED = torch.iinfo(torch.int64).max
_GONE = _SKIPPED - 1


class Resident:
    """Row `wanted[b, h, k]` of the store lies at `[b, h, k]`; -1 is kept as `_SKIPPED`.

    Ids are found by binary search in `keys`, the ids of each head in rising order: O(K log K),
    and nothing of size `[K, K]`. `slots` says where in its head's rows the row of a key is; it is
    None when the ids came in order.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        batch, heads, _, width = shape
        self._dtype = dtype
        self._words = as_words(torch.empty((1, width), dtype=dtype, device=device))[:0].clone()
        self._wanted = torch.empty((batch, heads, 0), dtype=torch.int64, device=device)
        self._keys = self._wanted
        self._slots: Tensor | None = None
        self.count = 0
        """How many of the ids are not -1."""

    @property
    def rows(self) -> Tensor:
        """`[B, H, K, D]`, the rows held, zeros for -1."""
        return from_words(self._words, (*self._wanted.shape, self._words.shape[1]), self._dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        slots = [] if self._slots is None else [self._slots]
        return [self._words, self._keys, self._wanted, *slots]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages behind it."""
        return storage_bytes(*self.tensors)

    def advance(self, ids: Tensor, source: Buffer) -> int:
        """Hold the rows of `ids`, `[B, H, K]` on the device; how many had to come from `source`."""
        absent = ids == -1
        wanted = ids.masked_fill(absent, _SKIPPED)
        if torch.equal(wanted, self._wanted):
            return 0
        places, hit = self._match(ids)
        missing = hit.logical_or_(absent).logical_not_().view(-1).nonzero().squeeze(1)
        skipped = absent.view(-1).nonzero().squeeze(1)
        # All that the host must wait for on the device comes before the rows start to move.
        keys, slots = _in_order(wanted)
        words = source.take((ids + source.starts).view(-1)[missing])
        if missing.shape[0] < ids.numel():
            words = self._with_moved(places.view(-1), missing, words)
            words.index_fill_(0, skipped, 0)
        self._words, self._wanted, self._keys, self._slots = words, wanted, keys, slots
        self.count = ids.numel() - skipped.shape[0]
        return missing.shape[0]

    def reorder(self, order: Tensor) -> None:
        """Batch row i becomes what batch row `order[i]` was."""
        batch, heads, resident = self._wanted.shape
        width = self._words.shape[1]
        if self._words.shape[0]:
            words = self._words.view(batch, heads, resident, width).index_select(0, order)
            self._words = words.view(order.shape[0] * heads * resident, width)
        same = self._keys is self._wanted
        self._wanted = self._wanted.index_select(0, order)
        self._keys = self._wanted if same else self._keys.index_select(0, order)
        if self._slots is not None:
            self._slots = self._slots.index_select(0, order)
        self.count = int((self._wanted != _SKIPPED).sum())

    def forget(self, limits: Tensor) -> None:
        """Rows from `limits[b]` on are gone from the store; their ids may come back as others."""

        def without(ids: Tensor) -> Tensor:
            return ids.masked_fill((ids >= limits) & (ids != _SKIPPED), _GONE)

        same = self._keys is self._wanted
        self._wanted = without(self._wanted)
        self._keys = self._wanted if same else without(self._keys)

    def _match(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where in `_words` each id's row is, and whether it is there at all; both `[B, H, K]`."""
        batch, heads, resident = self._keys.shape
        if not resident:
            return ids, torch.zeros_like(ids, dtype=torch.bool)
        place = torch.searchsorted(self._keys, ids).clamp_(max=resident - 1)
        hit = self._keys.gather(-1, place) == ids
        if self._slots is not None:
            place = self._slots.gather(-1, place)
        bases = torch.arange(batch * heads, device=ids.device) * resident
        return place.add_(bases.view(batch, heads, 1)), hit

    def _with_moved(self, places: Tensor, missing: Tensor, moved: Tensor) -> Tensor:
        """Words of the rows at `places`, those that were `missing` replaced by the `moved` ones."""
        if self._words.shape[0]:
            words = self._words.index_select(0, places)
        else:
            words = self._words.new_empty((places.shape[0], self._words.shape[1]))
        return words.index_copy_(0, missing, moved)


def _in_order(wanted: Tensor) -> tuple[Tensor, Tensor | None]:
    """The ids of each head rising, and where each was; None if they rose already."""
    if bool((wanted[..., 1:] >= wanted[..., :-1]).all()):
        return wanted, None
    keys, slots = wanted.sort(dim=-1)
    return keys, slots
