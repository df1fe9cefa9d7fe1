"""PyramidKV: SnapKV with more entries in the first layers than in the last.

Source: "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_integration.baselines.snapkv import SnapKV
from kv_integration.method import Row
from kv_policies import pyramid_budgets


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keep `budget` tokens per KV head on the mean over layers, falling along a line.

    Args:
        beta: how much less than the mean the last layer gets; 20 in the released code.
        The others are SnapKV's.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 1:
            raise ValueError(f"beta must be at least 1, got {self.beta}")

    def granted(self, row: Row) -> int:
        mean = row.granted(self.budget)
        budgets = pyramid_budgets(
            mean * row.layers,
            row.layers,
            beta=self.beta,
            minimum=min(mean, self.window),
            capacity=row.tokens,
        )
        return budgets[row.layer]
