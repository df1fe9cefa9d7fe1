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
        records: 1-dimensional tensors of one dtype and device, any of them empty. They are copied
            into one block, bit for bit.
        tier: where they are held.
        device: where `TieredStore` would send rows; for tier `device` where the records lie. The
            records' own by default.
        path: name of the file while the tier is `disk`; it must not exist.

    Raises:
        TypeError: a record is no tensor, or has another dtype than the first.
        ValueError: there are no records, one is not 1-dimensional, or `tier` is none of the three.
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        records: Sequence[Shaped[Tensor, " _"]],
        *,
        tier: Tier = "device",
        device: torch.device | str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if len(records) == 0:
            raise ValueError("records is empty, wanted at least one tensor")
        for i, record in enumerate(records):
            if not isinstance(record, Tensor):
                raise TypeError(f"records[{i}] is {record!r}, wanted a tensor")
            if record.ndim != 1:
                raise ValueError(f"records[{i}] has shape {tuple(record.shape)}, wanted [n]")
            if record.dtype != records[0].dtype:
                raise TypeError(
                    f"records[{i}] has dtype {record.dtype}, wanted {records[0].dtype}"
                )
        self._ends = list(accumulate(record.numel() for record in records))
        self._store = TieredStore(
            torch.cat(list(records)).view(1, 1, -1, 1), tier=tier, device=device, path=path
        )

    def __len__(self) -> int:
        """How many records there are."""
        return len(self._ends)

    def read(self, ids: Sequence[int]) -> list[Shaped[Tensor, " _"]]:
        """The records `ids`, in their order: views of where they lie, to be read only.

        Raises:
            IndexError: an id is not in `[0, len)`.
            StoreClosedError: the store is closed.
        """
        numbers = self._store._open().rows.view(-1)
        found = []
        for i in ids:
            if not 0 <= i < len(self._ends):
                raise IndexError(f"ids asks for record {i}, wanted 0 to {len(self._ends) - 1}")
            found.append(numbers[self._ends[i - 1] if i else 0 : self._ends[i]])
        return found

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
