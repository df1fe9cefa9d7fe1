"""Compressed entries of a prompt: lists of unequal length per row and KV head, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_attn_triton import ragged_attention, selected_attention
from kv_integration.storable import storable
from kv_offload import storage_bytes


@storable
@dataclass
class Entries:
    """Keys [N, D] and values [N, Dv]; list (b, h) is `starts[b, h]` .. `+ lengths[b, h]`.

    log_size: float32[N], log of the tokens each entry stands for, or None when all stand for one.
    positions: int64[N], each entry's place in its row, or None when nobody asks.

    Lists never change, so rows of a batch that descend from one prompt share theirs.
    """

    keys: Tensor
    values: Tensor
    starts: Tensor
    lengths: Tensor
    log_size: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def pack(cls, rows: Sequence[RowEntries]) -> Entries:
        """All rows' lists one after the other."""
        lengths = torch.stack([row.lengths for row in rows])
        ends = lengths.flatten().cumsum(0)
        return cls(
            torch.cat([row.keys for row in rows]),
            torch.cat([row.values for row in rows]),
            (ends - lengths.flatten()).view_as(lengths).to(torch.int64),
            lengths.to(torch.int32),
            _cat([row.log_size for row in rows]),
            _cat([row.positions for row in rows]),
        )

    def attend(self, queries: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Queries [B, H_q, Q, D] over all entries of their KV head: `(out, lse)`."""
        return ragged_attention(
            queries,
            self.keys,
            self.values,
            self.starts,
            self.lengths,
            log_size=self.log_size,
            scale=scale,
        )

    def attend_selected(
        self, queries: Tensor, indices: Tensor, *, scale: float, padded: bool
    ) -> tuple[Tensor, Tensor]:
        """Queries over the entries at `indices` [B, H_kv, K] of each list: `(out, lse)`.

        padded: whether `indices` may end in -1, which is skipped. `log_size` is not looked at.
        """
        at = indices + self.starts[..., None]
        if padded:
            at = at.masked_fill_(indices < 0, -1)
        # Every list is given all entries, without a copy: `at` says which are its own.
        keys, values = (x.expand(*self.starts.shape, *x.shape) for x in (self.keys, self.values))
        return selected_attention(queries, keys, values, at, scale=scale)

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was; no entry is copied."""
        self.starts = self.starts.index_select(0, rows)
        self.lengths = self.lengths.index_select(0, rows)

    def place(self, row: int, head: int) -> slice:
        """Where the entries of one list lie."""
        start = int(self.starts[row, head])
        return slice(start, start + int(self.lengths[row, head]))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist."""
        given = (self.log_size, self.positions)
        own = (self.keys, self.values, self.starts, self.lengths)
        return storage_bytes(*own, *(x for x in given if x is not None))


@dataclass(frozen=True)
class RowEntries:
    """One row's lists, head after head: keys [n, D], values [n, Dv], lengths int64[H_kv].

    log_size, positions: [n], as in `Entries`.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    log_size: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def equal(cls, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> RowEntries:
        """From [1, H, n, D] of lists of one length; positions int64[1, 1 or H, n]."""
        _, heads, count, _ = keys.shape
        return cls(
            keys.reshape(heads * count, -1),
            values.reshape(heads * count, -1),
            torch.full((heads,), count, device=keys.device),
            positions=None if positions is None else positions[0].expand(heads, -1).flatten(),
        )

    @classmethod
    def live(
        cls,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        log_size: Tensor | None,
        *,
        track: bool,
    ) -> RowEntries:
        """From [1, H, n, D] with positions int64[1, H, n], -1 where there is no entry.

        The positions themselves are kept only if somebody will `track` them.
        """
        here = positions[0] >= 0
        sizes = None if log_size is None else log_size[0][here]
        tracked = positions[0][here] if track else None
        return cls(keys[0][here], values[0][here], here.sum(-1), sizes, tracked)


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None
