"""Segments of what a cache has seen: of the prompt, and of all tokens when it compresses again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kv_integration.method import Plan, Row
from kv_integration.storable import storable
from kv_offload import storage_bytes

Cut = Callable[[NDArray[np.int64], NDArray[np.bool_]], NDArray[np.int64]]


@storable
class SegmentPlan(Plan):
    """Segments by a function `cut` of kv-segment from token ids and a table of delimiters."""

    def __init__(self, ids: Sequence[Tensor], table: NDArray[np.bool_], cut: Cut) -> None:
        super().__init__([segments(row, table, cut) for row in ids])
        self.table, self.cut = table, cut
        self.ids = list(ids)
        self._latest: dict[int, tuple[int, Tensor]] = {}

    def settle(self, *, recompress: bool) -> None:
        super().settle(recompress=recompress)
        if not recompress:
            self.ids = []

    def of(self, row: Row) -> Tensor:
        """Segments of a row's entries, int64[S + 1]; int64[H, S + 1] where heads hold unlike ones.

        Segments without entries are left out; heads with fewer segments end in repeats of T.
        """
        if row.positions is None:
            return self.offsets[row.index]
        positions = row.positions[0].cummax(-1).values  # padding belongs to the entry before it
        if bool((positions == positions[:1]).all()):
            positions = positions[:1]
        offsets = self._of_all(row.index, row.seen).expand(len(positions), -1)
        at = torch.searchsorted(positions, offsets[:, 1:].contiguous())
        own = [torch.unique_consecutive(torch.cat([ends.new_zeros(1), ends])) for ends in at]
        return pad_sequence(own, True, row.tokens) if len(own) > 1 else own[0]

    def advance(self, ids: Tensor, valid: Tensor | None) -> None:
        for row, own in enumerate(self.ids):
            new = ids[row] if valid is None else ids[row][valid[row]]
            self.ids[row] = torch.cat([own, new])

    def crop(self, tokens: int) -> None:
        self.ids = [row[: len(row) - tokens] for row in self.ids]

    def select_rows(self, rows: Tensor) -> None:
        order = rows.tolist()
        self.offsets = [self.offsets[row] for row in order]
        self.ids = [self.ids[row] for row in order] if self.ids else []
        self._latest = {}

    @property
    def nbytes(self) -> int:
        latest = (offsets for _, offsets in self._latest.values())
        return storage_bytes(*self.offsets, *self.ids, *latest)

    def _of_all(self, row: int, seen: int) -> Tensor:
        """Segments of all tokens of a row so far; the layers ask one after the other."""
        if self._latest.get(row, (0, None))[0] != seen:
            self._latest[row] = seen, segments(self.ids[row][:seen], self.table, self.cut)
        return self._latest[row][1]


def segments(ids: Tensor, table: NDArray[np.bool_], cut: Cut) -> Tensor:
    """Segments of one row's tokens by a function of kv-segment: int64[S + 1] on the ids' device."""
    return torch.from_numpy(cut(ids.cpu().numpy(), table)).to(ids.device)


def cut_offsets(offsets: Tensor, tokens: int) -> Tensor:
    """Segments of the first `tokens` entries: the one that crosses the cut ends there."""
    return torch.cat([offsets[offsets < tokens], offsets.new_tensor([tokens])])


def runs(tokens: int, size: int, like: Tensor) -> Tensor:
    """Equal runs of `size` tokens, the last one shorter: int64[S + 1] on the device of `like`."""
    ends = torch.arange(size, tokens + size, size, device=like.device).clamp(max=tokens)
    return torch.cat([ends.new_zeros(1), ends])
