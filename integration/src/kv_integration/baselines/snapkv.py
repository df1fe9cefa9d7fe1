"""SnapKV: each KV head keeps the tokens that the end of the prompt looks at.

Source: "SnapKV: LLM Knows What You are Looking for Before Generation", Listing 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kv_integration.budget import check_budget
from kv_integration.eviction import Eviction, everything, with_latest
from kv_integration.method import Plan, Row
from kv_integration.observation import Pooling, check_observation, observed_scores, split_observed
from kv_policies import top_tokens


@dataclass(frozen=True)
class SnapKV(Eviction):
    """Keep `budget` tokens per KV head, the last `window` among them.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        window: latest tokens, whose queries score the others; at most a quarter of the budget.
        pooling, kernel: how scores are pooled over neighbours; the paper's kernels are 5 and 7,
            its released code pools by the average.

    Scores are averaged over the query heads of a KV head, so that keys are not repeated.
    """

    budget: int | float = 1024
    window: int = 32
    pooling: Pooling = "avg"
    kernel: int = 7

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_observation(self.window, self.pooling, self.kernel)

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def granted(self, row: Row) -> int:
        """Entries that this layer may keep."""
        return row.granted(self.budget)

    def keep(self, row: Row, plan: Plan) -> Tensor:
        budget = self.granted(row)
        if budget == row.tokens:
            return everything(row)
        window, selected = split_observed(row, budget, self.window)
        scores = observed_scores(
            row, window, pooling=self.pooling, kernel=self.kernel, reduce="kv_head"
        )
        return with_latest(top_tokens(scores, selected), row, window)
