"""Where the rows of each batch row and head are in one flat table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


class Layout:
    """Row i of head h of batch row b is row `starts[b, h] + i` of the table.

    Batch row b holds `lengths[b]` rows per head in room for `rooms[b]`; its heads follow one
    another and so do the batch rows, each with its own length: none is padded to the longest.

    Attributes:
        starts: int64 `[B, H, 1]` on the table's device.
        limits: int64 `[B, 1, 1]` there, `lengths` as a tensor.
        longest: the greatest of `lengths`; a batch without rows keeps the length it was given.
    """

    def __init__(
        self, heads: int, lengths: Sequence[int], rooms: Sequence[int], *, longest: int
    ) -> None:
        self.heads = heads
        self.rooms = list(rooms)
        self.lengths = list(lengths)
        self.longest = max(self.lengths, default=longest)
        self.first = [heads * begin for begin in accumulate(self.rooms, initial=0)]
        room, first = _column(self.rooms), _column(self.first[:-1])
        self.starts = first + torch.arange(heads).view(1, -1, 1) * room
        self.limits = _column(self.lengths)

    @property
    def total(self) -> int:
        """Rows of the table, room included."""
        return self.first[-1]

    @property
    def even(self) -> bool:
        """Whether all batch rows have the same length and the same room."""
        return len(set(self.rooms)) <= 1 and len(set(self.lengths)) <= 1

    def to(self, device: torch.device) -> Layout:
        """Move the tensors to where the table is."""
        with torch.inference_mode(False):
            self.starts, self.limits = self.starts.to(device), self.limits.to(device)
        return self

    def set(self, lengths: Sequence[int], *, longest: int) -> None:
        """Hold `lengths[b]` rows from now on, all within the room."""
        steps = {new - old for new, old in zip(lengths, self.lengths, strict=True)}
        if len(steps) == 1:
            self.limits += steps.pop()  # the way of a decoding step: nothing goes to the device
        else:
            self.limits.copy_(_column(lengths))
        self.lengths = list(lengths)
        self.longest = max(lengths, default=longest)

    def grown(self, lengths: Sequence[int]) -> list[int]:
        """Room for `lengths[b]` rows and as many more as the whole table has room for now.

        Each batch row gets the same number of spare rows, so that rows appended one by one copy
        O(1) rows each however unequal the lengths are.
        """
        spare = -(-sum(self.rooms) // max(len(self.rooms), 1))
        held = zip(lengths, self.lengths, strict=True)
        return [max(wanted, length + spare) for wanted, length in held]


def _column(numbers: Sequence[int]) -> torch.Tensor:
    """int64 `[B, 1, 1]`."""
    # They outlive the call: as inference tensors they could not be changed later.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64).view(-1, 1, 1)
