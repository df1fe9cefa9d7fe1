"""SABlock: evict tokens by punctuation segments, segment-guided scores and adaptive blocks.

Source: "SABlock: Semantic-Aware KV Cache Eviction with Adaptive Compression Block Size",
Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kv_integration.budget import check_budget
from kv_integration.eviction import Eviction, everything, with_latest
from kv_integration.method import Context, Plan, Row
from kv_integration.observation import Pooling, check_observation, observed_scores, split_observed
from kv_integration.segments import SegmentPlan, cut_offsets
from kv_policies import adaptive_blocks
from kv_score import segment_guided
from kv_segment import DELIMITERS_CLAUSE, by_punctuation


@dataclass(frozen=True)
class SABlock(Eviction):
    """Keep `budget` tokens of the prompt, the last `window` among them, on the device.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        window: latest tokens, kept uncompressed, whose queries score the others (w); at most a
            quarter of the budget.
        beta: weight of a segment's entropy beside its mean importance (Eq. 7).
        lam: how strongly the segment's weight moves its tokens' scores (Eq. 8); 0 for not at all.
        max_block: largest block size tried (B_max).
        delta: share of the token-level score that the blocks of a segment must keep (Eq. 12).
        pooling, kernel: how the window's scores are pooled (`observed_scores`). The paper names
            SnapKV's window score and no pooling; "none" takes it to the letter.

    Its ablations: `lam=0` guides by no segment, `max_block=1` selects token by token, `delta=0`
    takes blocks of `max_block` whatever they lose.

    The paper's text does not show the values it found best for beta, lambda, B_max and w. beta,
    lambda and B_max are the middle of the ranges in which it reports no difference (Section IV-E);
    all were checked, and w was chosen, by a sweep over needles on the embedded model
    (`kv-bench sweep`, `benchmarks/results/sweep`).
    """

    budget: int | float = 1024
    window: int = 16
    beta: float = 0.5
    lam: float = 0.5
    max_block: int = 9
    delta: float = 0.9
    pooling: Pooling = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_observation(self.window, self.pooling, self.kernel)
        for name, value in (("beta", self.beta), ("lam", self.lam)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        if self.max_block < 1:
            raise ValueError(f"max_block must be at least 1, got {self.max_block}")
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta must be in [0, 1], got {self.delta}")

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        table = context.delimiters(DELIMITERS_CLAUSE)
        return SegmentPlan(ids, table, by_punctuation)

    def keep(self, row: Row, plan: Plan) -> Tensor:
        budget = row.granted(self.budget)
        if budget == row.tokens:
            return everything(row)
        window, selected = split_observed(row, budget, self.window)
        earlier = row.tokens - window
        scores = observed_scores(row, window, pooling=self.pooling, kernel=self.kernel)
        offsets = cut_offsets(plan.of(row), earlier)
        guided = segment_guided(scores, offsets, beta=self.beta, lam=self.lam)
        blocks = adaptive_blocks(
            guided, offsets, selected, max_block=self.max_block, delta=self.delta
        )
        return with_latest(blocks, row, window)
