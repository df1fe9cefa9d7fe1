"""InfiniGen: the layer before says which tokens a layer will want, so that they can be fetched.

Source: "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache
Management", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kv_integration.budget import check_budget
from kv_integration.lowscores import LowKeys
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.retrieval import Retrieval
from kv_lowrank import truncated_svd


@dataclass(frozen=True)
class InfiniGen(Method):
    """Attend the `budget` entries of the prompt that the layer before expects to score highest.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        share: of the head's dimensions in which queries and keys are speculated with; 0.3 in the
            paper.
        observe: the prompt's last queries, whose singular vectors choose these dimensions.
        alpha: fetch only tokens whose score is within `alpha` of the best (4 or 5 in the paper);
            None: always the whole budget.
        offload: hold keys and values on the host, as in the paper, or all on the device.

    In a decoding step the input of layer l - 1's attention passes the projections of layer l's:
    the query they make chooses the tokens, whose move to the device then overlaps with the rest
    of layer l - 1. The first layer, and one after a layer with a sliding window, chooses by its
    own query.

    Two things differ from the paper. It takes the dimensions offline, by turning the weights of
    queries and keys; that does not go together with RoPE, so here the queries after RoPE are
    factored, at the end of each prompt. And it speculates with part of the query weights, where
    here the next layer's attention module runs as it is, for models of any kind: a step reads its
    projections twice.
    """

    budget: int | float = 1024
    share: float = 0.3
    observe: int = 128
    alpha: float | None = None
    offload: bool = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")
        if self.observe < 1:
            raise ValueError(f"observe must be at least 1, got {self.observe}")
        if self.alpha is not None and not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be finite and at least 0, got {self.alpha}")

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        bases = [self._basis(row) for row in rows]
        index = LowKeys(rows, self.budget, bases, alpha=self.alpha)
        return Retrieval(rows, index, offload=self.offload, looks_ahead=rows[0].layer > 0)

    def _basis(self, row: Row) -> Tensor:
        """[H_kv, D, d], the directions that hold most of the queries of each KV head's group."""
        heads, dim = row.keys.shape[1], row.keys.shape[-1]
        queries = row.queries[0].float().reshape(heads, -1, dim)
        return truncated_svd(queries, math.ceil(self.share * dim)).right.mT
