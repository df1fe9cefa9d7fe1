"""States of bounded size that go on forgetting: each new token takes the place of another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kv_attn_triton import attention, merge_states
from kv_integration.buffer import KVBuffer
from kv_integration.method import LayerState, Row
from kv_offload import storage_bytes


def capacities(budget: int | float, rows: Sequence[Row]) -> list[int]:
    """Entries per list of each row. Unlike elsewhere a number may exceed the prompt: what is
    generated counts, too."""
    return [budget if isinstance(budget, int) else row.granted(budget) for row in rows]


class Bounded(LayerState):
    """`keys`, `values`: [B, H_kv, C, D]; the first `used[b]` slots of a row's lists are live.

    capacity: entries that each row may hold. seen: its tokens so far.
    """

    def __init__(self, rows: Sequence[Row], capacity: Sequence[int]) -> None:
        heads, slots = rows[0].keys.shape[1], max(capacity)
        self.keys, self.values = (
            x.new_zeros(len(rows), heads, slots, x.shape[-1])
            for x in (rows[0].keys, rows[0].values)
        )
        self.capacity = list(capacity)
        self.used, self.seen = [0] * len(rows), [0] * len(rows)

    @abstractmethod
    def place(self) -> Tensor | int:
        """The slot that the next token takes: int64[B, 1 or H_kv], an int if it is one for all."""

    @abstractmethod
    def absorb(self, row: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        """Several tokens of one row have come: keep what the capacity allows of all there is.

        queries [1, H_q, n, D], keys and values [1, H_kv, n, D].
        """

    def attended(self, queries: Tensor, lse: Tensor, scale: float) -> None:
        """One token has attended: queries [B, H_q, 1, D], log-sum-exp float32[B, H_q, 1]."""

    def paid(self, queries: Tensor, lse: Tensor, scale: float) -> Tensor:
        """Attention of one token's query heads to every slot, float32[B, H_kv, G, C], C slots.

        Arguments as of `attended`. What it says of slots that are not live means nothing.
        """
        batch, heads, slots, dim = self.keys.shape
        lists = batch * heads
        q, keys = queries.reshape(lists, -1, dim), self.keys.view(lists, slots, dim).mT
        total = lse.reshape(lists, -1, 1)
        if q.dtype == torch.float32:
            logits = torch.baddbmm(total, q, keys, beta=-1, alpha=scale)
        else:  # rounded once, by the product
            logits = torch.bmm(q, keys).float().mul_(scale).sub_(total)
        return logits.exp_().view(batch, heads, -1, slots)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        if queries.shape[2] == 1 and valid is None:
            self._put(self.place(), keys, values)
            self.seen = [n + 1 for n in self.seen]
            self.used = [min(n + 1, c) for n, c in zip(self.used, self.capacity, strict=True)]
            out, lse = self._attend(queries, scale)
            self.attended(queries, lse, scale)
            return out
        new = KVBuffer.empty(self.keys.shape[:2], keys, values)
        new.append(keys, values, valid)
        out = merge_states([self._attend(queries, scale), new.attend(queries, scale=scale)])[0]
        for row in range(len(self.used)):
            own = new.row(row)
            if own[0].shape[2]:
                latest = queries[row : row + 1, :, -own[0].shape[2] :]
                self.absorb(row, latest, *own, scale)
        return out

    def _put(self, slots: Tensor | int, keys: Tensor, values: Tensor) -> None:
        """One token's keys and values [B, H_kv, 1, D] into its slots, as `place` says them."""
        if isinstance(slots, int):
            self.keys[:, :, slots : slots + 1] = keys
            self.values[:, :, slots : slots + 1] = values
            return
        if slots.numel() == 1:  # `scatter_` wants an index for every number
            self.keys.index_copy_(2, slots[0], keys)
            self.values.index_copy_(2, slots[0], values)
            return
        at = slots[:, :, None, None]
        self.keys.scatter_(2, at.expand(keys.shape), keys)
        self.values.scatter_(2, at.expand(values.shape), values)

    def _attend(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return attention(queries, self.keys, self.values, lengths=self.lengths(), scale=scale)

    def lengths(self) -> Tensor | None:
        """Live slots, int32[B, H_kv]; None when all of them are."""
        if min(self.used) == self.keys.shape[2]:
            return None
        used = torch.tensor(self.used, dtype=torch.int32, device=self.keys.device)
        return used[:, None].expand(-1, self.keys.shape[1]).contiguous()

    def entries(self) -> Tensor:
        return torch.tensor(self.used)[:, None].expand(-1, self.keys.shape[1])

    def nbytes(self) -> dict[str, int]:
        return {"device": storage_bytes(self.keys, self.values), "host": 0, "disk": 0}

    def crop(self, tokens: int) -> None:
        if any(n > c for n, c in zip(self.seen, self.capacity, strict=True)):
            raise ValueError(
                f"{tokens} tokens cannot be taken back: what they displaced is forgotten"
            )
        self.seen = [n - tokens for n in self.seen]
        self.used = [n - tokens for n in self.used]

    def select_rows(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        for name in ("capacity", "used", "seen"):
            setattr(self, name, [getattr(self, name)[row] for row in rows.tolist()])
