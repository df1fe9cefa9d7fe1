"""Quest: pages of the prompt by the largest dot product that their bounds allow.

Source: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", section 3 and
Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_integration.baselines.full import FullKV
from kv_integration.budget import check_budget
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.retrieval import Index, Retrieval, stack_rows
from kv_integration.storable import storable
from kv_score import bound_scores, page_bounds


@dataclass(frozen=True)
class Quest(Method):
    """Attend `budget` entries of the prompt per step, in pages.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]). Pages in
            falling order; the last that is taken is cut to its first tokens to meet it exactly.
        page: tokens per page; 16 in the paper.
        offload: hold keys and values on the host and the pages' bounds on the device. The paper
            holds all on the device.
        whole_layers: the first so many layers attend all of the prompt, which stays on the device.
            The paper's 2 are 6% of its models' layers; their attention is spread over the whole
            prompt, which no budget holds. They count in reports with all their entries, so the
            default is none: a budget means the same for every method.

    The paper's models have one query head per KV head. Here a page's score is the largest of any
    query head of its KV head, so that heads of a group share what they read.
    """

    budget: int | float = 1024
    page: int = 16
    offload: bool = False
    whole_layers: int = 0

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.page < 1:
            raise ValueError(f"page must be at least 1, got {self.page}")
        if self.whole_layers < 0:
            raise ValueError(f"whole_layers must be at least 0, got {self.whole_layers}")

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        if rows[0].layer < self.whole_layers:
            return FullKV().compress(rows, plan)
        return Retrieval(rows, Pages(rows, self), offload=self.offload)


@storable
class Pages(Index):
    """Smallest and largest value of each channel in each page, [B, H_kv, P, D] both."""

    def __init__(self, rows: Sequence[Row], method: Quest) -> None:
        super().__init__(rows, method.budget)
        self.size = method.page
        bounds = [page_bounds(row.keys, self.size) for row in rows]
        self.lower = stack_rows([lower[0] for lower, _ in bounds])
        self.upper = stack_rows([upper[0] for _, upper in bounds])

    def choose(self, queries: Tensor, scale: float) -> Tensor:
        mask = self.real(self.lower.shape[2], self.size)
        scores = bound_scores(queries, self.lower, self.upper, mask=mask)
        # One page more than fits, for the prompt's last page may be short.
        enough = math.ceil(max(self.budgets) / self.size) + 1
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :enough]
        tokens, budgets = self.limits
        held = (tokens - order * self.size).clamp(0, self.size)
        taken = torch.minimum(held, budgets - (held.cumsum(-1) - held)).clamp(min=0)
        place = torch.arange(self.size, device=order.device)
        none = max(self.tokens)
        indices = torch.where(place < taken[..., None], order[..., None] * self.size + place, none)
        indices = indices.flatten(2).sort().values[..., : max(self.budgets)]
        return indices.masked_fill_(indices == none, -1)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.lower, self.upper]

    def replace(self, tensors: Sequence[Tensor]) -> None:
        self.lower, self.upper = tensors
