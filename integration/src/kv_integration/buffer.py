"""Keys and values on the device: a list of entries per row and KV head, with room to grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kv_attn_triton import attention
from kv_integration.storable import storable
from kv_offload import storage_bytes

ROOM, LEAST = 64, 8  # entries free at most in a new buffer, and added at the least


@storable
class KVBuffer:
    """`keys`, `values`: [B, H_kv, capacity, D]; the first `lengths[b, h]` entries are live.

    While every list has the same length, `lengths` is None and `count` says it, so that attention
    takes a slice and needs no mask. Growing is geometric: a token costs no copy of the rest.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> None:
        self.keys, self.values, self.lengths = keys, values, lengths
        self.count = keys.shape[2]

    @classmethod
    def empty(cls, shape: Sequence[int], keys: Tensor, values: Tensor) -> KVBuffer:
        """No entries yet; `shape` is (B, H_kv), the rest that of `keys` and `values`."""
        return cls(*(x.new_empty(*shape, 0, x.shape[-1]) for x in (keys, values)))

    @classmethod
    def stack(cls, rows: Sequence[tuple[Tensor, Tensor]]) -> KVBuffer:
        """One buffer from rows of keys and values [1, H_kv, n_b, D] whose n_b may differ."""
        counts = [keys.shape[2] for keys, _ in rows]
        _, heads, _, dim = rows[0][0].shape
        count = max(counts)
        shape = (len(rows), heads, count + min(_room(count), ROOM))
        keys = rows[0][0].new_empty(*shape, dim)
        values = rows[0][1].new_empty(*shape, rows[0][1].shape[-1])
        for row, (row_keys, row_values) in enumerate(rows):
            keys[row, :, : counts[row]] = row_keys[0]
            values[row, :, : counts[row]] = row_values[0]
        buffer = cls(keys, values)
        buffer.count = count
        if min(counts) != count:
            lengths = torch.tensor(counts, dtype=torch.int32, device=keys.device)
            buffer.lengths = lengths[:, None].expand(-1, heads).contiguous()
        return buffer

    def stored_fields(self) -> dict[str, Any]:
        """What is live, for a file: the room to grow is not."""
        live = slice(0, self.count)
        return {
            "keys": self.keys[:, :, live],
            "values": self.values[:, :, live],
            "lengths": self.lengths,
            "count": self.count,
        }

    def append(self, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> None:
        """Add entries [B, H_kv, n, D]; of row b only those where `valid` [B, n] holds."""
        new = keys.shape[2]
        self._reserve(self.count + new)
        if self.lengths is None and valid is None:
            free = slice(self.count, self.count + new)
            self.keys[:, :, free] = keys
            self.values[:, :, free] = values
            self.count += new
            return
        lengths = self._lengths()
        if valid is None:
            # The way of a decoding step: nothing here makes the host wait for the device.
            place = lengths[:, :, None] + torch.arange(new, device=keys.device)
            for held, fresh in ((self.keys, keys), (self.values, values)):
                held.scatter_(2, place.long()[..., None].expand(fresh.shape), fresh)
            self.lengths = lengths + new
            self.count += new
            return
        offset = valid.cumsum(-1) - 1
        at = lengths[:, :, None] + offset[:, None].to(torch.int32)
        row, head, token = valid[:, None].expand(at.shape).nonzero(as_tuple=True)
        place = at[row, head, token].long()
        self.keys[row, head, place] = keys[row, head, token]
        self.values[row, head, place] = values[row, head, token]
        self.lengths = lengths + valid.sum(-1, dtype=torch.int32)[:, None]
        self.count += new

    def drop(self, first: Sequence[int], numbers: Sequence[int]) -> None:
        """Forget `numbers[b]` entries of every list of row b, those from `first[b]` on."""
        if self.lengths is None and len(set(numbers)) > 1:
            self.lengths = self._lengths()
        for row, (start, number) in enumerate(zip(first, numbers, strict=True)):
            for held in (self.keys, self.values):
                later = held[row, :, start + number : self.count].clone()
                held[row, :, start : self.count - number] = later
        if self.lengths is None:
            self.count -= numbers[0]
        else:
            self.lengths = self.lengths - self.lengths.new_tensor(numbers)[:, None]
            self.count = int(self.lengths.max())  # what else would tell rows that drop in turn

    def attend(self, queries: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of the last Q entries' queries [B, H_q, Q, D], causal: `(out, lse)`."""
        return attention(
            queries,
            self.keys.narrow(2, 0, self.count),
            self.values.narrow(2, 0, self.count),
            lengths=self.lengths,
            causal=queries.shape[2] > 1,
            scale=scale,
        )

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H_kv, n, D] of one row, all of whose heads hold n entries; views."""
        count = self.count if self.lengths is None else int(self.lengths[index, 0])
        part = slice(index, index + 1)
        return self.keys[part, :, :count], self.values[part, :, :count]

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` entries of every list."""
        self.count -= tokens
        if self.lengths is not None:
            self.lengths = self.lengths - tokens

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was: reorder, repeat or drop rows of the batch."""
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist, the room to grow included."""
        lengths = [] if self.lengths is None else [self.lengths]
        return storage_bytes(self.keys, self.values, *lengths)

    def _lengths(self) -> Tensor:
        if self.lengths is not None:
            return self.lengths
        shape = self.keys.shape[:2]
        return torch.full(shape, self.count, dtype=torch.int32, device=self.keys.device)

    def _reserve(self, count: int) -> None:
        """Make room for lists of `count` entries."""
        if count <= self.keys.shape[2]:
            return
        capacity = count + _room(count)

        def grown(old: Tensor) -> Tensor:
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : self.count] = old[:, :, : self.count]
            return new

        self.keys, self.values = grown(self.keys), grown(self.values)


def _room(count: int) -> int:
    """Entries to add to `count` when a buffer grows: an eighth, so that short lists stay short."""
    return max(LEAST, count // 8)
