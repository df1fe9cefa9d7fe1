"""Loki: tokens by their scores in the few dimensions that hold most of the keys' variance.

Source: "Loki: Low-Rank Keys for Efficient Sparse Attention", Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_integration.budget import check_budget
from kv_integration.cache import KVCache
from kv_integration.lowscores import LowKeys
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.retrieval import Retrieval
from kv_lowrank import truncated_svd

LEAST = 32  # dimensions without a share: a quarter of the paper's heads of 128


@dataclass(frozen=True)
class Loki(Method):
    """Attend the `budget` entries of the prompt that score highest in `share` of the dimensions.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        share: of the head's dimensions that scores are taken in (d_f); the paper tries 0.125,
            0.25 and 0.5. None: a quarter, but at least 32 dimensions, or all of a head that has
            fewer. A quarter of the paper's heads of 128 are 32; what the leading ones leave out
            first is where a token stands, and a smaller head needs no fewer for that.
        bases: for each compressed layer the principal directions [H_kv, D, d] of keys after RoPE,
            from other text as in the paper (`loki_bases`). None: those of the prompt itself.
        offload: hold keys and values on the host, the low-dimensional keys on the device. The
            paper holds all on the device.

    The paper rotates the keys it attends and scores by their first columns. Here keys stay as they
    are and the columns are held beside them: d / 2D more bytes, and no rounding of keys.
    Heads of a group share what they read: a token counts by its largest share of any head's
    softmax over the low-dimensional scores.
    """

    budget: int | float = 1024
    share: float | None = None
    bases: tuple[Tensor, ...] | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        bases = [self._basis(row) for row in rows]
        return Retrieval(rows, LowKeys(rows, self.budget, bases), offload=self.offload)

    def dimensions(self, size: int) -> int:
        """In how many dimensions the scores of a head of `size` are taken (d)."""
        if self.share is None:
            return min(max(math.ceil(size / 4), LEAST), size)
        return math.ceil(self.share * size)

    def _basis(self, row: Row) -> Tensor:
        """[H_kv, D, d], the leading principal directions of the layer's keys."""
        if self.bases is None:
            keys = row.keys[0].float()
            rank = self.dimensions(keys.shape[-1])
            return truncated_svd(keys - keys.mean(1, keepdim=True), rank).right.mT
        if len(self.bases) != row.layers:
            raise ValueError(
                f"bases holds {len(self.bases)} layers, wanted {row.layers}, the compressed ones"
            )
        basis = self.bases[row.layer]
        wanted = (row.keys.shape[1], row.keys.shape[3])
        if basis.dim() != 3 or tuple(basis.shape[:2]) != wanted:
            raise ValueError(
                f"bases[{row.layer}] has shape {tuple(basis.shape)}, wanted [{wanted[0]}, "
                f"{wanted[1]}, d]"
            )
        return basis.to(row.keys.device, torch.float32)


def loki_bases(cache: KVCache) -> tuple[Tensor, ...]:
    """`bases` for other prompts, from a cache that Loki has filled with one row of text.

    Raises:
        ValueError: the cache holds no such prompt.
    """
    states = [layer.state for layer in cache.compressed]
    indices = [state.index if isinstance(state, Retrieval) else None for state in states]
    if not all(isinstance(index, LowKeys) and len(index.bases) == 1 for index in indices):
        raise ValueError("the cache must hold one row of a prompt by Loki")
    return tuple(index.bases[0] for index in indices if isinstance(index, LowKeys))
