"""Keys in a few dimensions, which choose the tokens that a step attends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from kv_integration.method import Row
from kv_integration.retrieval import Index, stack_rows
from kv_integration.storable import storable
from kv_policies import top_tokens
from kv_score import landmark_scores


@storable
class LowKeys(Index):
    """Keys in the directions `bases` [H_kv, D, d] of their row and KV head: [B, H_kv, T, d].

    A token's score is its softmax share for queries in the same directions, the largest of the
    query heads of its KV head. With `alpha` only tokens count whose share is at least exp(-alpha)
    of the largest.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        budget: int | float,
        bases: Sequence[Tensor],
        *,
        alpha: float | None = None,
    ) -> None:
        super().__init__(rows, budget)
        self.alpha = alpha
        # Prompts shorter than d span fewer directions; zeros fill up.
        self.bases = stack_rows([basis.mT for basis in bases]).mT.contiguous()
        low = [row.keys[0].float() @ basis for row, basis in zip(rows, self.bases, strict=True)]
        self.keys = stack_rows(low).to(rows[0].keys.dtype)

    def choose(self, queries: Tensor, scale: float) -> Tensor:
        scores = self.scores(queries, scale)
        if self.alpha is not None:
            least = scores.amax(-1, keepdim=True) * math.exp(-self.alpha)
            scores = scores.masked_fill(scores < least, -math.inf)
        return top_tokens(scores, self.budgets, check=False)

    @property
    def padded(self) -> bool:
        return self.alpha is not None or super().padded

    def scores(self, queries: Tensor, scale: float) -> Tensor:
        """float32[B, H_kv, T] for queries [B, H_q, 1, D]; -inf where there is no token."""
        batch, heads, width, dim = self.bases.shape
        low = queries.float().reshape(batch, heads, -1, width) @ self.bases
        mask = self.real(self.keys.shape[2])
        if mask is not None:
            mask = mask[:, None].expand(-1, heads, -1)
        return landmark_scores(
            low.reshape(batch, -1, 1, dim).to(self.keys.dtype), self.keys, scale=scale, mask=mask
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [self.bases, self.keys]

    def replace(self, tensors: Sequence[Tensor]) -> None:
        self.bases, self.keys = tensors
