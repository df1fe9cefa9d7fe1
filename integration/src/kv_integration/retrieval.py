"""A prompt that is held whole, on the device or on the host, and read in part.

Every decoding step attends the entries of the prompt that an index finds for its query, and all
tokens that came after the prompt. An input of several tokens, a later turn, attends all of the
prompt, as its own forward pass did (`by_need`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kv_attn_triton import merge_states
from kv_integration.buffer import KVBuffer
from kv_integration.entries import Entries, RowEntries
from kv_integration.method import LayerState, Row
from kv_integration.offloaded import Offloaded
from kv_integration.storable import storable
from kv_offload import storage_bytes


class Index(ABC):
    """What finds a prompt's entries for a query; lies on the device.

    tokens, budgets: of each row, how many entries there are and how many a step may attend.
    """

    def __init__(self, rows: Sequence[Row], budget: int | float) -> None:
        self.tokens = [row.tokens for row in rows]
        self.budgets = [row.granted(budget) for row in rows]
        device = rows[0].keys.device
        self.limits = torch.tensor([self.tokens, self.budgets], device=device)[..., None, None]

    @abstractmethod
    def choose(self, queries: Tensor, scale: float) -> Tensor:
        """Entries for queries [B, H_q, 1, D]: int64[B, H_kv, K], ascending, -1 last."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What a method adds, each [B, ...]."""

    @abstractmethod
    def replace(self, tensors: Sequence[Tensor]) -> None:
        """Hold these `tensors` instead."""

    @property
    def padded(self) -> bool:
        """Whether `choose` may give -1."""
        return len(set(self.budgets)) > 1

    def real(self, count: int, size: int = 1) -> Tensor | None:
        """bool[B, count]: which runs of `size` tokens a row has; None when all rows have all."""
        if len(set(self.tokens)) == 1:
            return None
        return torch.arange(count, device=self.limits.device) * size < self.limits[0, :, 0]

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.replace([tensor.index_select(0, rows) for tensor in self.tensors])
        self.limits = self.limits.index_select(1, rows)
        order = rows.tolist()
        self.tokens = [self.tokens[row] for row in order]
        self.budgets = [self.budgets[row] for row in order]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist."""
        return storage_bytes(*self.tensors, self.limits)


@storable
class Retrieval(LayerState):
    """The prompt on the device or, if `offload`, on the host; its index; and what came since.

    looks_ahead: whether the layer before may say which query is to be expected (`expect`).
    """

    def __init__(
        self, rows: Sequence[Row], index: Index, *, offload: bool, looks_ahead: bool = False
    ) -> None:
        self.index, self.looks_ahead = index, looks_ahead
        self.prompt: Entries | Offloaded
        if offload:
            parts = [(row.keys, row.values) for row in rows]
            self.prompt = Offloaded(parts, capacity=max(index.budgets))
        else:
            self.prompt = Entries.pack([RowEntries.equal(row.keys, row.values) for row in rows])
        heads = rows[0].keys.shape[1]
        self.recent = KVBuffer.empty((len(rows), heads), rows[0].keys, rows[0].values)
        self.expected: Tensor | None = None

    def expect(self, queries: Tensor, *, scale: float) -> None:
        self.expected = self.index.choose(queries, scale)
        if isinstance(self.prompt, Offloaded):
            self.prompt.prefetch(self.expected)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        self.recent.append(keys, values, valid)
        recent = self.recent.attend(queries, scale=scale)
        found = by_need(
            queries,
            alone(queries, valid),
            whole=lambda queries: self.prompt.attend(queries, scale=scale),
            chosen=lambda last: self._attend_chosen(last, scale),
        )
        return merge_states([recent, found])[0]

    def _attend_chosen(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        indices, self.expected = self.expected, None
        if indices is None:
            indices = self.index.choose(queries, scale)
        return self.prompt.attend_selected(queries, indices, scale=scale, padded=self.index.padded)

    def entries(self) -> Tensor:
        return torch.tensor(self.index.budgets)[:, None].expand(-1, self.recent.keys.shape[1])

    def nbytes(self) -> dict[str, int]:
        expected = [] if self.expected is None else [self.expected]
        tiers = {"device": 0, "host": 0, "disk": 0}
        if isinstance(self.prompt, Offloaded):
            tiers |= self.prompt.nbytes
        else:
            tiers["device"] = self.prompt.nbytes
        tiers["device"] += self.index.nbytes + self.recent.nbytes + storage_bytes(*expected)
        return tiers

    def crop(self, tokens: int) -> None:
        self.recent.crop(tokens)
        self.expected = None

    def select_rows(self, rows: Tensor) -> None:
        self.index.select_rows(rows)
        self.prompt.select_rows(rows)
        self.recent.select_rows(rows)
        self.expected = None

    def traffic(self) -> dict[str, int]:
        return self.prompt.traffic() if isinstance(self.prompt, Offloaded) else super().traffic()


def alone(queries: Tensor, valid: Tensor | None) -> Tensor | None:
    """bool[B]: rows whose only new token stands beside other rows' turns; None if there is none.

    queries: [B, H_q, Q, D]. valid: bool[B, Q], False for padding.
    """
    if valid is None or queries.shape[2] == 1:
        return None
    rows = valid.sum(1) == 1
    return rows if bool(rows.any()) else None


def by_need(
    queries: Tensor,
    stepping: Tensor | None,
    *,
    whole: Callable[[Tensor], tuple[Tensor, Tensor]],
    chosen: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attention over what is held of the prompt: of a step over a part, of a turn over all of it.

    A decoding step, queries [B, H_q, 1, D], reads what is `chosen` for it. An input of several
    tokens is read with the `whole`, as the prompt itself was: what a question is about is known at
    its last tokens and in later layers only. A choice that all of its tokens share, made in every
    layer before that is known, would leave their states without what the question asks for. It
    costs O(T) once per turn.

    stepping: bool[B], the rows that take a step while others take a turn (`alone`). Both functions
    take queries and return `(out, lse)`.
    """
    if queries.shape[2] == 1:
        return chosen(queries)
    out, lse = whole(queries)
    if stepping is None:
        return out, lse
    own, own_lse = chosen(queries[:, :, -1:])
    rows = stepping[:, None, None]
    return torch.where(rows[..., None], own, out), torch.where(rows, own_lse, lse)


def stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows [H, n_b, D] of unequal n as one [B, H, n, D], the shorter ones ending in zeros."""
    return pad_sequence([row.transpose(0, 1) for row in rows], True).transpose(1, 2).contiguous()
