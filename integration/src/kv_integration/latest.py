"""The last queries that a layer saw, for methods whose scores come from an observation window."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_integration.storable import storable
from kv_offload import storage_bytes


@storable
class LatestQueries:
    """The last `count` tokens' queries of every row.

    Up to twice as many are held, so that they are copied once per `count` tokens and `crop` has
    something to go back to.
    """

    def __init__(self, count: int) -> None:
        self.count = max(count, 1)
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._queries: list[Tensor] = []
        self._valid: list[Tensor] = []

    def append(self, queries: Tensor, valid: Tensor | None) -> None:
        """Queries [B, H_q, Q, D] of new tokens; `valid` [B, Q], False for padding."""
        if valid is None:
            valid = queries.new_ones(queries.shape[0], queries.shape[2], dtype=torch.bool)
        first = max(valid.shape[1] - self.count, 0)
        self._queries.append(queries[:, :, first:].clone())
        self._valid.append(valid[:, first:].clone())
        if self._held > 2 * self.count:
            self._keep(slice(self._held - self.count, None))

    def row(self, row: int) -> Tensor:
        """[1, H_q, N, D] of one row, N at most `count`, without padding."""
        queries = torch.cat([part[row] for part in self._queries], dim=1)
        valid = torch.cat([part[row] for part in self._valid])
        queries = queries[None, :, valid]
        return queries[:, :, max(queries.shape[2] - self.count, 0) :]

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens`."""
        self._keep(slice(0, max(self._held - tokens, 0)))

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self._queries = [part.index_select(0, rows) for part in self._queries]
        self._valid = [part.index_select(0, rows) for part in self._valid]

    @property
    def empty(self) -> bool:
        """Whether no tokens are held."""
        return self._held == 0

    @property
    def _held(self) -> int:
        return sum(part.shape[1] for part in self._valid)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist."""
        return storage_bytes(*self._queries, *self._valid)

    def _keep(self, columns: slice) -> None:
        if self._valid:
            self._queries = [torch.cat(self._queries, dim=2)[:, :, columns].clone()]
            self._valid = [torch.cat(self._valid, dim=1)[:, columns].clone()]
