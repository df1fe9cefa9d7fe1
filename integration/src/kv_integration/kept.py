"""What is left of a prompt on the device, and the tokens that came after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kv_attn_triton import merge_states
from kv_integration.buffer import KVBuffer
from kv_integration.entries import Entries, RowEntries
from kv_integration.method import LayerState, Recalled
from kv_integration.storable import storable
from kv_offload import storage_bytes


def hold(rows: Sequence[RowEntries]) -> LayerState:
    """The state that fits: one buffer if every list has one length, packed lists otherwise."""
    lengths = torch.stack([row.lengths for row in rows]).cpu()
    if rows[0].log_size is None and bool((lengths == lengths[0, 0]).all()):
        return Kept(rows, int(lengths[0, 0]))
    return Packed(rows)


@storable
class Kept(LayerState):
    """Lists of one length, followed in the same buffer by the tokens that came after the prompt."""

    def __init__(self, rows: Sequence[RowEntries], count: int) -> None:
        heads = len(rows[0].lengths)
        self.count = count
        self.buffer = KVBuffer.stack(
            [
                (row.keys.view(1, heads, count, -1), row.values.view(1, heads, count, -1))
                for row in rows
            ]
        )
        self.positions: Tensor | None = None
        if rows[0].positions is not None:
            given = [row.positions for row in rows if row.positions is not None]
            self.positions = torch.stack(given).view(len(rows), heads, count)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        self.buffer.append(keys, values, valid)
        return self.buffer.attend(queries, scale=scale)[0]

    def entries(self) -> Tensor:
        return torch.full(self.buffer.keys.shape[:2], self.count)

    def nbytes(self) -> dict[str, int]:
        positions = 0 if self.positions is None else storage_bytes(self.positions)
        return {"device": self.buffer.nbytes + positions, "host": 0, "disk": 0}

    def crop(self, tokens: int) -> None:
        self.buffer.crop(tokens)

    def select_rows(self, rows: Tensor) -> None:
        self.buffer.select_rows(rows)
        if self.positions is not None:
            self.positions = self.positions.index_select(0, rows)

    def recall(self, row: int, seen: int) -> Recalled:
        if self.positions is None:
            return super().recall(row, seen)
        keys, values = self.buffer.row(row)
        own = self.positions[row : row + 1]
        since = _latest(seen, keys.shape[2] - self.count, own)
        return Recalled(keys, values, torch.cat([own, since], dim=2), None)


@storable
class Packed(LayerState):
    """Lists of unequal length without padding; the tokens after them have a buffer of their own."""

    def __init__(self, rows: Sequence[RowEntries]) -> None:
        self.prompt = Entries.pack(rows)
        self.tail = KVBuffer.empty(self.prompt.starts.shape, self.prompt.keys, self.prompt.values)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        self.tail.append(keys, values, valid)
        recent = self.tail.attend(queries, scale=scale)
        return merge_states([self.prompt.attend(queries, scale=scale), recent])[0]

    def entries(self) -> Tensor:
        return self.prompt.lengths.to("cpu", torch.int64)

    def nbytes(self) -> dict[str, int]:
        return {"device": self.prompt.nbytes + self.tail.nbytes, "host": 0, "disk": 0}

    def crop(self, tokens: int) -> None:
        self.tail.crop(tokens)

    def select_rows(self, rows: Tensor) -> None:
        self.prompt.select_rows(rows)
        self.tail.select_rows(rows)

    def recall(self, row: int, seen: int) -> Recalled:
        prompt, (keys, values) = self.prompt, self.tail.row(row)
        if prompt.positions is None:
            return super().recall(row, seen)
        lists = [prompt.place(row, head) for head in range(keys.shape[1])]

        def padded(x: Tensor, fill: float) -> Tensor:
            return pad_sequence([x[one] for one in lists], True, fill)[None]

        own = padded(prompt.positions, -1)
        since = _latest(seen, keys.shape[2], own)
        log_size = None
        if prompt.log_size is not None:
            single = prompt.log_size.new_zeros(since.shape)
            log_size = torch.cat([padded(prompt.log_size, 0.0), single], dim=2)
        return Recalled(
            torch.cat([padded(prompt.keys, 0.0), keys], dim=2),
            torch.cat([padded(prompt.values, 0.0), values], dim=2),
            torch.cat([own, since], dim=2),
            log_size,
        )


def _latest(seen: int, count: int, like: Tensor) -> Tensor:
    """Positions of the last `count` of `seen` tokens, for every head of `like` [1, H, *]."""
    return torch.arange(seen - count, seen, device=like.device).expand(1, like.shape[1], -1)
