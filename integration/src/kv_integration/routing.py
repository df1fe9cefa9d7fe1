"""SeKV's routing: queries and span summaries in one small space, and a threshold per query head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kv_integration.router import Router
from kv_integration.storable import storable
from kv_offload import storage_bytes


@storable
@dataclass
class Routing:
    """One layer's routing. Each of both has one row for all, or one per row of the batch.

    projection: W of Eqs. 3 and 4, [B or 1, H_r, d', D], where H_r is H_q, or H_kv where the query
    heads of a group share theirs. threshold: logit of tau in Eq. 9, float32[B or 1, H_q]. router:
    whose projection of `layer` it is; all caches share it and none counts it as its own.
    """

    projection: Tensor
    threshold: Tensor
    router: Router | None = None
    layer: int = 0

    @property
    def shared(self) -> bool:
        """Whether rows have no routing of their own."""
        return self.router is not None

    @classmethod
    def of_router(cls, router: Router, layer: int) -> Routing:
        """A layer's routing as `router` learned it."""
        projection, threshold = router.projections.detach(), router.threshold_logits.detach()
        return cls(projection[layer, None], threshold[layer, None], router, layer)

    @classmethod
    def stack(cls, rows: Sequence[Routing]) -> Routing:
        """The routing of a batch: a router's once, or that of each row."""
        first = rows[0]
        if first.shared:
            return first
        return cls(
            torch.cat([row.projection for row in rows]), torch.cat([row.threshold for row in rows])
        )

    def summaries(self, means: Tensor) -> Tensor:
        """Routing keys [B, H_r, S, d'] of length 1 from mean keys [B, H_kv, S, D].

        The projection of the weighted mean is the weighted mean of the projections (Eq. 3).
        """
        groups = self.projection.shape[1] // means.shape[1]
        spread = means.repeat_interleave(groups, 1).to(self.projection.dtype)
        return F.normalize(spread @ self.projection.mT, dim=-1)

    def logits(self, queries: Tensor, summaries: Tensor, log_size: Tensor) -> Tensor:
        """Relevance before the sigmoid of Eq. 5: float32[B, H_q, Q, S].

        queries: [B, H_q, Q, D]. log_size: float32[B, S], log |S|, -inf where there is no span.
        """
        batch, heads, count, size = queries.shape
        of = summaries.shape[1]
        # The queries of heads that share a projection are rows of one matrix.
        rows = queries.reshape(batch, of, heads // of * count, size).to(self.projection.dtype)
        routed = (rows @ self.projection.mT).to(summaries.dtype) @ summaries.mT
        scores = routed.view(batch, heads, count, -1).float()
        return torch.add(log_size[:, None, None], scores, alpha=summaries.shape[-1] ** -0.5)

    def stored_fields(self) -> dict[str, Any]:
        """For a file: a router's projection is not repeated there."""
        return vars(self) | ({"projection": None} if self.shared else {})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Routing:
        """As `stored_fields` gave them."""
        router = fields["router"]
        if router is None:
            return cls(**fields)
        return replace(cls.of_router(router, fields["layer"]), threshold=fields["threshold"])

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        if not self.shared:
            self.projection = self.projection.index_select(0, rows)
            self.threshold = self.threshold.index_select(0, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are this cache's own."""
        return 0 if self.shared else storage_bytes(self.projection, self.threshold)


def logit(tau: float) -> float:
    """log(tau / (1 - tau)), infinite at 0 and 1: what the sigmoid is compared with."""
    if tau <= 0:
        return -math.inf
    return math.inf if tau >= 1 else math.log(tau / (1 - tau))


def observed_threshold(logits: Tensor, quantile: float) -> Tensor:
    """Thresholds that the prompt's last queries would exceed for a share 1 - `quantile` of spans.

    logits: float32[1, H_q, N, S]; result float32[1, H_q].
    """
    pairs = logits.flatten(2)
    # torch.quantile refuses more than 2**24 numbers and interpolates what needs no interpolation
    place = min(int(quantile * pairs.shape[-1]), pairs.shape[-1] - 1)
    return pairs.kthvalue(place + 1, dim=-1).values
