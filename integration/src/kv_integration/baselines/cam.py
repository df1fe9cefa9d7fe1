"""CaM: heavy hitters, with the values of evicted tokens merged into those that follow.

Source: "CaM: Cache Merging for Memory-efficient LLMs Inference", section 4, Algorithm 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_integration.budget import check_budget
from kv_integration.entries import RowEntries
from kv_integration.eviction import add_rows, entries_at, take
from kv_integration.heavy import check_recent, heavy_hitters
from kv_integration.kept import hold
from kv_integration.method import LayerState, Method, Plan, Row


@dataclass(frozen=True)
class CaM(Method):
    """Keep `budget` entries per KV head; an evicted value goes on in the next `spread` kept ones.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        recent: share of the budget for the latest tokens, in (0, 1].
        spread: kept entries that share an evicted value (m).
        seed: of the draws: an evicted token is merged with a probability, its attention over the
            mean attention of the entries that would take it, at most 1.

    Acts once, at the end of the prompt. Scores come with the prompt's own attention.
    """

    budget: int | float = 1024
    recent: float = 0.5
    spread: int = 8
    seed: int = 0

    observe = sys.maxsize
    accumulates = True
    recompresses = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_recent(self.recent)
        if self.spread < 1:
            raise ValueError(f"spread must be at least 1, got {self.spread}")

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return hold([self._merged(row, plan) for row in rows])

    def _merged(self, row: Row, plan: Plan) -> RowEntries:
        kept, scores = heavy_hitters(row, row.granted(self.budget), self.recent)
        values = self._merge(row, kept, scores)
        return entries_at(row, kept, plan, keys=take(row.keys, kept), values=values)

    def _merge(self, row: Row, kept: Tensor, scores: Tensor) -> Tensor:
        """Values of the kept entries [1, H, K, D] with their shares of the evicted ones."""
        heads, count = kept.shape[1:]
        tokens = torch.arange(row.tokens, device=kept.device).expand(1, heads, -1)
        # the entries that take token t: `spread` kept ones from the first after it, or the last
        first = torch.searchsorted(kept, tokens.contiguous())
        first = first.clamp(max=max(count - self.spread, 0))
        takers = first[..., None] + torch.arange(min(self.spread, count), device=kept.device)
        taken = scores.gather(2, kept)[..., None, :].expand(-1, -1, row.tokens, -1)
        chance = scores / taken.gather(3, takers).mean(-1).clamp(min=1e-20)
        chance = chance.scatter(2, kept, 0.0).clamp(max=1.0)
        draws = torch.Generator(kept.device).manual_seed(self.seed + row.layer)
        merged = torch.rand(chance.shape, generator=draws, device=kept.device) < chance
        values = take(row.values, kept).float()
        given = torch.zeros_like(values)  # to each entry as the first of those that take it
        add_rows(given, first, row.values, merged / takers.shape[-1])
        for i in range(takers.shape[-1]):
            values[:, :, i:] += given[:, :, : count - i]
        return values.to(row.values.dtype)
