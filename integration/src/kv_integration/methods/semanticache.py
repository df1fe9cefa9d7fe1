"""SemantiCache: cluster similar tokens inside delimiter chunks, one weighted entry per cluster.

Source: "SemantiCache: Efficient KV Cache Compression via Semantic Chunking and Clustered Merging",
Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kv_integration.budget import check_budget
from kv_integration.entries import RowEntries
from kv_integration.kept import hold
from kv_integration.method import Context, LayerState, Method, Plan, Row
from kv_integration.segments import SegmentPlan, runs
from kv_policies import greedy_clusters, merge, threshold_for_budget
from kv_segment import DELIMITERS_SEMANTICACHE, by_delimiters


@dataclass(frozen=True)
class SemantiCache(Method):
    """Keep delimiters as they are and the mean of each cluster between them, on the device.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]), delimiters
            included; met by bisection on theta, for each head. Where delimiters and one entry per
            chunk are more, the report says so.
        theta: cosine above which a token joins a seed, in [-1, 1], in place of a budget, which
            then is the whole prompt. The paper picks it from [0.5, 0.9].
        chunks: `delimiters` (Eq. 1), or for ablation `fixed` runs of `chunk_size` or `none`.
        proportional: add the log of a cluster's size to its logit (Eq. 4).

    The text lost its formulas: similarity is the cosine of the cached keys (Eq. 2), a cluster's
    entry is the mean of its keys and of its values (Eq. 3).

    When a cache compresses again and one entry per chunk is still more than the budget, the
    entries are clustered in equal runs instead, delimiters among them: memory stays bounded.
    """

    budget: int | float = 1024
    theta: float | None = None
    chunks: Literal["delimiters", "fixed", "none"] = "delimiters"
    chunk_size: int = 16
    proportional: bool = True

    recompresses = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.theta is not None and not -1 <= self.theta <= 1:
            raise ValueError(f"theta must be in [-1, 1], got {self.theta}")
        if self.theta is not None:
            object.__setattr__(self, "budget", 1.0)
        if self.chunks not in ("delimiters", "fixed", "none"):
            raise ValueError(f"chunks must be 'delimiters', 'fixed' or 'none', got {self.chunks!r}")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        if self.chunks != "delimiters":
            return Plan()
        return SegmentPlan(ids, context.delimiters(DELIMITERS_SEMANTICACHE), by_delimiters)

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return hold([self._merged(row, plan) for row in rows])

    def _merged(self, row: Row, plan: Plan) -> RowEntries:
        # Heads are the rows of what follows: compressed again, each has entries of its own.
        keys, values = row.keys.transpose(0, 1), row.values.transpose(0, 1)
        positions = torch.arange(row.tokens, device=keys.device)[None, None]
        if row.positions is not None:
            positions = row.positions
        positions = positions.expand(1, len(keys), -1).transpose(0, 1)
        valid = positions[:, 0] >= 0
        offsets = self._chunks(row, plan)
        theta: float | Tensor | None = self.theta
        if theta is None:
            budget = row.granted(self.budget)
            found = threshold_for_budget(keys, offsets, budget, valid=valid, check=False)
            if row.positions is not None and bool((found.excess > 0).any()):
                offsets = runs(row.tokens, math.ceil(2 * row.tokens / budget), keys)
                found = threshold_for_budget(keys, offsets, budget, valid=valid, check=False)
            theta = found.theta
        seeds = greedy_clusters(keys, offsets, theta, valid=valid, check=False)
        sizes = None if row.log_size is None else row.log_size.transpose(0, 1)
        merged = merge(keys, values, seeds, log_size=sizes, check=False)
        at = positions.gather(2, merged.seeds.clamp(min=0)).where(merged.seeds >= 0, -1)
        keys, values, at = (x.transpose(0, 1) for x in (merged.keys, merged.values, at))
        size = merged.log_size.transpose(0, 1) if self.proportional else None
        return RowEntries.live(keys, values, at, size, track=plan.recompress)

    def _chunks(self, row: Row, plan: Plan) -> Tensor:
        if self.chunks == "delimiters":
            return plan.of(row)
        size = self.chunk_size if self.chunks == "fixed" else row.tokens
        return runs(row.tokens, size, row.keys)
