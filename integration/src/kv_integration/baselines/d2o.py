"""D2O: heavy hitters, with evicted entries merged into the most similar kept ones or dropped.

Source: "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large
Language Models", section 3.3.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kv_integration.budget import check_budget
from kv_integration.entries import RowEntries
from kv_integration.eviction import add_rows, entries_at, take
from kv_integration.heavy import check_recent, heavy_hitters
from kv_integration.kept import hold
from kv_integration.method import LayerState, Method, Plan, Row

CHUNK = 256  # entries that are compared with all kept ones at a time: what stays in the cache
RUN = 32  # kept entries whose best is found before the best of all


@dataclass(frozen=True)
class D2O(Method):
    """Keep `budget` entries per KV head; similar evicted ones are averaged into them.

    An evicted entry whose best cosine with a kept key is at least the mean of these bests joins
    that entry: keys and values become weighted means with weights e for the kept one and e^cosine
    for each that joins. The others are dropped.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        recent: share of the budget for the latest tokens, in (0, 1]; 1/4 in the paper.

    Acts once, at the end of the prompt, where the paper's moving threshold is the mean. All layers
    get the same budget: the paper's share by layer needs the attention of every layer before the
    first is compressed, and so the whole uncompressed cache. Scores come with the prompt's own
    attention.
    """

    budget: int | float = 1024
    recent: float = 0.25

    observe = sys.maxsize
    accumulates = True
    recompresses = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_recent(self.recent)

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return hold([self._merged(row, plan) for row in rows])

    def _merged(self, row: Row, plan: Plan) -> RowEntries:
        kept, _ = heavy_hitters(row, row.granted(self.budget), self.recent)
        if kept.shape[2] == row.tokens:
            return entries_at(row, kept, plan, keys=row.keys, values=row.values)
        cosine, nearest = best_match(row.keys, kept)
        evicted = torch.ones_like(cosine, dtype=torch.bool).scatter(2, kept, False)
        threshold = (cosine * evicted).sum(2, keepdim=True) / evicted.sum(2, keepdim=True)
        weight = torch.where(evicted & (cosine >= threshold), cosine.exp(), 0.0)
        total = torch.full(kept.shape, math.e, device=kept.device)
        total = total.scatter_add(2, nearest, weight)

        def merged(x: Tensor) -> Tensor:
            sums = take(x, kept).float() * math.e
            add_rows(sums, nearest, x, weight)
            return (sums / total[..., None]).to(x.dtype)

        return entries_at(row, kept, plan, keys=merged(row.keys), values=merged(row.values))


def best_match(keys: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """For each key the best cosine with a kept one, float32[1, H, T], and which: int64[1, H, T]."""
    unit = normalize(keys.float(), dim=-1)
    count = kept.shape[2]
    # whole runs: the last one is filled up with the last entry
    kept = torch.cat([kept, kept[..., -1:].expand(-1, -1, -count % RUN)], 2)
    own = take(unit, kept)
    parts = [_largest(part @ own.mT) for part in unit.split(CHUNK, dim=2)]
    cosine, nearest = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return cosine, nearest.clamp(max=count - 1)


def _largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest of each row of x [..., N] and where it is, run by run: a search for an index is slow.

    N: a multiple of `RUN`.
    """
    runs = x.unflatten(-1, (-1, RUN))
    largest, run = runs.amax(-1).max(-1)
    inner = runs.gather(-2, run[..., None, None].expand(*run.shape, 1, RUN)).squeeze(-2)
    return largest, run * RUN + inner.argmax(-1)
