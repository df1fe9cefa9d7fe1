"""ChunkKV: whole chunks of neighbouring tokens, by the attention that they get together.

Source: "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM
Inference", Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kv_integration.budget import check_budget
from kv_integration.eviction import Eviction, everything, with_latest
from kv_integration.method import Plan, Row
from kv_integration.observation import Pooling, check_observation, observed_scores, split_observed
from kv_integration.segments import runs
from kv_policies import top_segments
from kv_score import segment_statistics


@dataclass(frozen=True)
class ChunkKV(Eviction):
    """Keep `budget` tokens in chunks, the last `window` tokens among them; all heads the same.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        window: latest tokens, whose queries score the others; at most a quarter of the budget.
        chunk: tokens per chunk; 10 in the paper. The last chunk that is taken is cut to its best
            tokens, so that the budget is met exactly.
        pooling, kernel: how scores are pooled over neighbours before chunks are ranked
            (`observed_scores`). Algorithm 1 pools nothing; the authors' code in kvpress ranks the
            scores of any method, and those of its SnapKV are the average over 5 neighbours.

    The paper's reuse of one layer's indices by the next ones is left out: scoring costs little.
    """

    budget: int | float = 1024
    window: int = 32
    chunk: int = 10
    pooling: Pooling = "none"
    kernel: int = 5

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_observation(self.window, self.pooling, self.kernel)
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def keep(self, row: Row, plan: Plan) -> Tensor:
        budget = row.granted(self.budget)
        if budget == row.tokens:
            return everything(row)
        window, selected = split_observed(row, budget, self.window)
        scores = observed_scores(row, window, pooling=self.pooling, kernel=self.kernel)
        offsets = runs(row.tokens - window, self.chunk, row.keys)
        mean, _ = segment_statistics(scores, offsets)
        return with_latest(top_segments(mean, scores, offsets, selected), row, window)
