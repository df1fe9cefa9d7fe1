"""H2O: half of the entries for the tokens that received most attention, half for the latest.

Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
Algorithm 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_integration.bounded import Bounded, capacities
from kv_integration.budget import check_budget
from kv_integration.eviction import take
from kv_integration.heavy import accumulated, check_recent
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.storable import storable
from kv_offload import storage_bytes
from kv_policies import top_tokens
from kv_score import accumulated_attention


@dataclass(frozen=True)
class H2O(Method):
    """Hold `budget` entries per KV head, generated tokens included, and go on accumulating.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        recent: share of the budget for the latest tokens, in (0, 1]; one half in the paper.

    Attention is summed over all queries and averaged over the query heads of a KV head; the sums
    come with the prompt's own attention. Tokens that come together, as in a later turn, see all
    that was held before them.
    """

    budget: int | float = 1024
    recent: float = 0.5

    observe = sys.maxsize
    accumulates = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_recent(self.recent)

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return HeavyHitters(rows, capacities(self.budget, rows), self.recent)


@storable
class HeavyHitters(Bounded):
    """score: float32[B, H_kv, C], attention received so far; position: int64[B, H_kv, C], -1 for
    slots without a token."""

    def __init__(self, rows: Sequence[Row], capacity: Sequence[int], recent: float) -> None:
        super().__init__(rows, capacity)
        self.recent = [math.ceil(recent * n) for n in self.capacity]
        self.score = self.keys.new_zeros(self.keys.shape[:3], dtype=torch.float32)
        self.position = torch.full(self.keys.shape[:3], -1, device=self.keys.device)
        for number, row in enumerate(rows):
            self._keep(number, accumulated(row), row.keys, row.values)

    def place(self) -> Tensor:
        """A free slot, else that of the lowest score among the tokens that are not recent."""
        device = self.keys.device
        used, seen, recent, capacity = (
            torch.tensor(x, device=device)[:, None]
            for x in (self.used, self.seen, self.recent, self.capacity)
        )
        # the new token is the latest one of the `recent`
        old = (self.position >= 0) & (self.position < (seen - recent + 1)[..., None])
        lowest = self.score.masked_fill(~old, math.inf).argmin(-1)
        slots = torch.where(used < capacity, used, lowest)
        self.position.scatter_(2, slots[..., None], seen[..., None].expand(slots[..., None].shape))
        self.score.scatter_(2, slots[..., None], 0.0)
        return slots

    def attended(self, queries: Tensor, lse: Tensor, scale: float) -> None:
        paid = self.paid(queries, lse, scale).mean(2)
        self.score += torch.where(self.position >= 0, paid, 0.0)

    def absorb(self, row: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        used = self.used[row]
        part = slice(row, row + 1), slice(None), slice(0, used)
        keys, values = (
            torch.cat([held[part], x], 2) for held, x in ((self.keys, keys), (self.values, values))
        )
        score = accumulated_attention(queries, keys, scale=scale, reduce="kv_head")
        score[..., :used] += self.score[part]
        self._keep(row, score, keys, values)

    def _keep(self, row: int, score: Tensor, keys: Tensor, values: Tensor) -> None:
        """What a row's capacity allows of its slots and the tokens after them: [1, H_kv, n, D]."""
        used, seen = self.used[row], self.seen[row]
        new = keys.shape[2] - used
        held = self.position[row : row + 1, :, :used]
        latest = torch.arange(seen, seen + new, device=keys.device)
        position = torch.cat([held, latest.expand(1, keys.shape[1], -1)], 2)
        kept = min(self.capacity[row], used + new)
        # slots are in no order, so that the latest are told by their positions
        protected = position >= seen + new - min(self.recent[row], kept)
        chosen = top_tokens(score, kept, protected=protected)
        self.keys[row, :, :kept] = take(keys, chosen)[0]
        self.values[row, :, :kept] = take(values, chosen)[0]
        self.score[row, :, :kept] = score.gather(2, chosen)[0]
        self.position[row, :, :kept] = position.gather(2, chosen)[0]
        self.seen[row], self.used[row] = seen + new, kept

    def nbytes(self) -> dict[str, int]:
        tiers = super().nbytes()
        return tiers | {"device": tiers["device"] + storage_bytes(self.score, self.position)}

    def crop(self, tokens: int) -> None:
        raise ValueError(
            f"H2O cannot take back {tokens} tokens: the attention that they paid is accumulated"
        )

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.score = self.score.index_select(0, rows)
        self.position = self.position.index_select(0, rows)
        self.recent = [self.recent[row] for row in rows.tolist()]
