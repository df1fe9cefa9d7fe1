"""Entries off the device: a step brings those that it attends, and only what is new moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from kv_attn_triton import attention, merge_states
from kv_integration.storable import storable
from kv_offload import HitCache, TieredStore

BLOCK = 4096  # entries per list that are on the device at a time when all of them are attended


@storable
class Offloaded:
    """Keys beside values [H_kv, N_b, D + Dv] per row on `tier`, and the last selection of them.

    capacity: the most entries per list that a step selects.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Tensor, Tensor]],
        *,
        capacity: int,
        tier: Literal["host", "disk"] = "host",
    ) -> None:
        """`rows`: keys and values [1, H_kv, N_b, D] of each row."""
        self.width = rows[0][0].shape[-1]
        entries = [torch.cat([keys[0], values[0]], dim=-1) for keys, values in rows]
        self.store = TieredStore.ragged(entries, tier=tier)
        self.hits = HitCache(self.store, max(capacity, 1))
        self.streamed = 0

    def attend_selected(
        self, queries: Tensor, indices: Tensor, *, scale: float, padded: bool
    ) -> tuple[Tensor, Tensor]:
        """Queries [B, H_q, Q, D] over the entries at `indices` [B, H_kv, K]: `(out, lse)`.

        padded: whether `indices` may end in -1, which is skipped.
        """
        keys, values = self._halves(self.hits.fetch(indices))
        lengths = (indices >= 0).sum(-1, dtype=torch.int32) if padded else None
        return attention(queries, keys, values, lengths=lengths, scale=scale)

    def attend(self, queries: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Queries [B, H_q, Q, D] over all entries, which pass through the device in blocks."""
        parts = [
            attention(queries, keys, values, lengths=lengths, scale=scale)
            for keys, values, lengths in self._blocks(queries.device)
        ]
        return merge_states(parts)

    def received(self, queries: Tensor, lse: Tensor, *, scale: float) -> Tensor:
        """What each entry gets of the attention of queries [B, H_q, n, D]: float32[B, H_kv, N].

        s_j = sum_i exp(scale * q_i . k_j - lse_i), the mean of the KV head's query heads.

        lse: float32[B, H_q, n], log of the sum over all that a query attends, these entries among
        it; inf for one that does not count. Entries that a row does not have get any number.
        """
        batch, _, count, dim = queries.shape
        heads = self.store.shape[1]
        grouped = queries.float().view(batch, heads, -1, dim)
        total = lse.view(batch, heads, -1, 1)
        parts = [
            torch.exp(scale * grouped @ keys.float().mT - total).sum(2)
            for keys, _, _ in self._blocks(queries.device)
        ]
        return torch.cat(parts, dim=-1) * (count / grouped.shape[2])

    def _blocks(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All entries: keys and values [B, H_kv, n, D], and how many of a block each row has."""
        _, heads, longest, width = self.store.shape
        counts = self.store.lengths.to(device)
        self.streamed += int(counts.sum()) * heads * width * self.store.dtype.itemsize
        for start in range(0, longest, BLOCK):
            at = torch.arange(start, min(start + BLOCK, longest), device=device)
            at = torch.where(at < counts[:, None], at, -1)[:, None].expand(-1, heads, -1)
            yield *self._halves(self.store.gather(at)), (at >= 0).sum(-1, dtype=torch.int32)

    def keys(self, indices: Tensor) -> Tensor:
        """Keys [B, H_kv, K, D] of the entries at `indices` [B, H_kv, K]; zeros for -1."""
        self.streamed += int((indices >= 0).sum()) * self.store.shape[3] * self.store.dtype.itemsize
        return self._halves(self.store.gather(indices))[0]

    def prefetch(self, indices: Tensor) -> None:
        """Start to move what the next selection, `indices`, will want."""
        self.hits.prefetch(indices)

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.store.select_rows(rows)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by tier of the tensors that exist."""
        tiers = dict(self.store.nbytes)
        tiers["device"] += self.hits.nbytes
        return tiers

    def traffic(self) -> dict[str, int]:
        """Counts since the prompt, as `LayerState.traffic`."""
        return {
            "bytes_moved": self.hits.bytes_moved + self.streamed,
            "hits": self.hits.hits,
            "misses": self.hits.misses,
        }

    def _halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[..., : self.width], rows[..., self.width :]
