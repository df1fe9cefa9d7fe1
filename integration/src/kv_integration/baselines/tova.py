"""TOVA: at every step the entry to which the latest token paid least attention is forgotten.

Source: "Transformers are Multi-State RNNs" (Oren et al. 2024), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_integration.bounded import Bounded, capacities
from kv_integration.budget import check_budget
from kv_integration.eviction import take
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.storable import storable
from kv_offload import storage_bytes
from kv_policies import top_tokens
from kv_score import accumulated_attention


@dataclass(frozen=True)
class TOVA(Method):
    """Hold `budget` entries of a layer, generated tokens included; all heads the same.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).

    Nothing is protected, neither the first tokens nor the latest. Of the prompt those are kept that
    its last query looks at most, on the mean over query heads. A step forgets one entry by what the
    token before it paid, then attends `budget` entries, its own among them: the paper's state of
    budget - 1, which forgets at the end of the step instead. Tokens that come together, as in a
    later turn, see all that was held before them, and the last of them decides.
    """

    budget: int | float = 1024

    observe = 1

    def __post_init__(self) -> None:
        check_budget(self.budget)

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return MultiState(rows, capacities(self.budget, rows))


@storable
class MultiState(Bounded):
    """score: float32[B, C], attention of the latest query, the mean over all its heads."""

    def __init__(self, rows: Sequence[Row], capacity: Sequence[int]) -> None:
        super().__init__(rows, capacity)
        shape = len(rows), self.keys.shape[2]
        self.score = self.keys.new_zeros(shape, dtype=torch.float32)
        for number, row in enumerate(rows):
            self.absorb(number, row.queries, row.keys, row.values, row.scale)

    def place(self) -> Tensor:
        """A free slot, else that of the lowest score."""
        score, device = self.score, self.keys.device
        if len(set(self.capacity)) > 1:
            slot = torch.arange(score.shape[1], device=device)
            past = slot >= torch.tensor(self.capacity, device=device)[:, None]
            score = score.masked_fill(past, math.inf)
        slots = score.argmin(-1)
        if self.used != self.capacity:
            used, capacity = (torch.tensor(x, device=device) for x in (self.used, self.capacity))
            slots = torch.where(used < capacity, used, slots)
        return slots[:, None]

    def attended(self, queries: Tensor, lse: Tensor, scale: float) -> None:
        self.score = self.paid(queries, lse, scale).mean((1, 2))

    def absorb(self, row: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        used, new = self.used[row], keys.shape[2]
        held = slice(row, row + 1), slice(None), slice(0, used)
        keys, values = (
            torch.cat([x[held], fresh], 2)
            for x, fresh in ((self.keys, keys), (self.values, values))
        )
        score = accumulated_attention(queries[:, :, -1:], keys, scale=scale, reduce="layer")
        kept = min(self.capacity[row], used + new)
        chosen = top_tokens(score, kept)
        self.keys[row, :, :kept] = take(keys, chosen)[0]
        self.values[row, :, :kept] = take(values, chosen)[0]
        self.score[row, :kept] = score.gather(2, chosen)[0, 0]
        self.used[row], self.seen[row] = kept, self.seen[row] + new

    def nbytes(self) -> dict[str, int]:
        tiers = super().nbytes()
        return tiers | {"device": tiers["device"] + storage_bytes(self.score)}

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.score = self.score.index_select(0, rows)
