"""Records of unequal length on one tier of memory, each read as one piece."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType

import torch
from jaxtyping import Shaped
from torch import Tensor

from kv_offload._buffer import Tier
from kv_offload.store import TieredStore


class RecordStore:
    """Lists of numbers of unequal length, none padded; `read([i])[0]` is record i.

    For what has no rows of one width, such as the low-rank factors of SeKV's spans (section 3.2),
    r (|S| + d + 1) numbers each. Tiers, pinning and the file of tier `disk` are as in
    `TieredStore`.

    Args:
        numbers: `[N]`, all records one after the other. Copied, bit for bit.
        lengths: of each record, at least 0; their sum is N.
        tier: where they are held.
        device: where the records lie on tier `device`; that of `numbers` by default.
        path: name of the file while the tier is `disk`; it must not exist.

    Raises:
        TypeError: `numbers` is no tensor, or has a dtype that cannot be stored.
        ValueError: `numbers` is not 1-dimensional, a length is negative, they do not sum to N, or
            `tier` is none of the three.
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        numbers: Shaped[Tensor, " N"],
        lengths: Sequence[int],
        *,
        tier: Tier = "device",
        device: torch.device | str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(numbers, Tensor):
            raise TypeError(f"numbers is {numbers!r}, wanted a tensor")
        if numbers.ndim != 1:
            raise ValueError(f"numbers has shape {tuple(numbers.shape)}, wanted [N]")
        if min(lengths, default=0) < 0:
            raise ValueError(f"lengths has {min(lengths)}, wanted at least 0")
        if sum(lengths) != numbers.numel():
            raise ValueError(
                f"lengths sums to {sum(lengths)}, wanted the {numbers.numel()} of numbers"
            )
        self._ends = list(accumulate(lengths))
        self._store = TieredStore(numbers.view(1, 1, -1, 1), tier=tier, device=device, path=path)

    def __len__(self) -> int:
        """How many records there are."""
        return len(self._ends)

    def read(self, ids: Sequence[int]) -> list[Shaped[Tensor, " _"]]:
        """The records `ids`, in their order: views of where they lie, to be read only.

        Raises:
            IndexError: an id is not in `[0, len)`.
            StoreClosedError: the store is closed.
        """
        numbers, found = self.numbers, []
        for i in ids:
            if not 0 <= i < len(self._ends):
                raise IndexError(f"ids asks for record {i}, wanted 0 to {len(self._ends) - 1}")
            found.append(numbers[self._ends[i - 1] if i else 0 : self._ends[i]])
        return found

    @property
    def numbers(self) -> Shaped[Tensor, " N"]:
        """All records one after the other, where they lie: to be read only.

        For who reads many at a time, by slices of its own: record i ends at `ends[i]`.

        Raises:
            StoreClosedError: the store is closed.
        """
        return self._store._open().rows.view(-1)

    @property
    def ends(self) -> Sequence[int]:
        """Where each record ends in `numbers`, and the next one begins."""
        return self._ends

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes per tier, of the storage that exists."""
        return self._store.nbytes

    @property
    def tier(self) -> Tier:
        """Where the records are held."""
        return self._store.tier

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers."""
        return self._store.dtype

    @property
    def device(self) -> torch.device:
        """The `device` it was given, that of `numbers` by default."""
        return self._store.device

    def close(self) -> None:
        """Free the records and remove the scratch file. Closing twice is fine."""
        self._store.close()

    def __enter__(self) -> RecordStore:
        self._store._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
