"""What a method is: it looks at a layer's prompt once and leaves a state that decoding attends to.

A method that only chooses tokens subclasses `Eviction` and writes `keep`. One that stores entries
in other ways subclasses `Method` and returns its own `LayerState`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_integration.buffer import KVBuffer
from kv_offload import storage_bytes
from kv_segment import delimiter_table


class Context:
    """What a method may ask about the model's surroundings: delimiter tables of the tokenizer."""

    def __init__(self, tokenizer: object | None) -> None:
        self.tokenizer = tokenizer
        self._tables: dict[tuple[str, ...], NDArray[np.bool_]] = {}

    def delimiters(self, texts: tuple[str, ...]) -> NDArray[np.bool_]:
        """bool[V]: which vocabulary entries end with one of `texts`; computed once.

        Raises:
            ValueError: the model was attached without a tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(
                "this method cuts the prompt at punctuation and needs the tokenizer: "
                "use attach(model, tokenizer)"
            )
        if texts not in self._tables:
            self._tables[texts] = delimiter_table(self.tokenizer, texts)
        return self._tables[texts]


@dataclass
class Plan:
    """What all layers share about one prompt: segments and whatever decoding must follow.

    offsets: one int64[S + 1] per row, over that row's tokens without padding.
    """

    offsets: list[Tensor] = field(default_factory=list)

    def advance(self, ids: Tensor, valid: Tensor | None) -> None:
        """Tokens [B, Q] enter the model after the prompt (`valid` [B, Q]: not padding)."""

    def select_rows(self, rows: Tensor) -> None:
        """Rows of the batch are reordered, repeated or dropped, as `KVBuffer.select_rows`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist."""
        return storage_bytes(*self.offsets)


@dataclass(frozen=True)
class Row:
    """One row's prompt in one layer, its padding removed.

    queries: [1, H_q, N, D], those of the last N tokens, N at most what the method observes.
    keys, values: [1, H_kv, T, D], the keys after RoPE. scale: of the dot products.
    """

    index: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]


class LayerState(ABC):
    """What one layer holds after its prompt was compressed, and how a step reads it."""

    @abstractmethod
    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        """Store new tokens and attend: queries [B, H_q, Q, D] -> [B, H_q, Q, D], causal.

        keys, values: [B, H_kv, Q, D] of the same tokens. valid: bool[B, Q], False for padding.
        """

    @abstractmethod
    def entries(self) -> Tensor:
        """int64[B, H_kv]: entries of the prompt that one decoding step attends."""

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes by tier (`device`, `host`, `disk`) of the tensors that exist."""

    @abstractmethod
    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens, all of which came after the prompt."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Reorder, repeat or drop rows of the batch."""

    def traffic(self) -> dict[str, int]:
        """Counts since the prompt: `bytes_moved` between tiers, `hits` and `misses` in entries."""
        return {"bytes_moved": 0, "hits": 0, "misses": 0}


class Kept(LayerState):
    """Entries that were kept as they are, followed by the tokens that came after the prompt."""

    def __init__(self, buffer: KVBuffer) -> None:
        self.buffer = buffer
        lengths = buffer.lengths
        full = torch.full(buffer.keys.shape[:2], buffer.count)
        self._entries = full if lengths is None else lengths.to("cpu", torch.int64)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        self.buffer.append(keys, values, valid)
        return self.buffer.attend(queries, scale=scale)[0]

    def entries(self) -> Tensor:
        return self._entries

    def nbytes(self) -> dict[str, int]:
        return {"device": self.buffer.nbytes, "host": 0, "disk": 0}

    def crop(self, tokens: int) -> None:
        self.buffer.crop(tokens)

    def select_rows(self, rows: Tensor) -> None:
        self.buffer.select_rows(rows)
        self._entries = self._entries.index_select(0, rows.cpu())


class Method(ABC):
    """A way to hold the prompt. Methods are immutable; all state lives in the cache."""

    budget: int | float = 1.0
    observe: int = 0  # how many of the prompt's last queries `compress` wants

    @property
    def name(self) -> str:
        """Name in reports and on the command line."""
        return type(self).__name__.lower()

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        """Look at the prompt's token ids, int64[T_b] per row, once for all layers."""
        return Plan()

    @abstractmethod
    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        """Make one layer's state from its prompt."""


class Eviction(Method):
    """A method that keeps some tokens of the prompt and forgets the rest."""

    @abstractmethod
    def keep(self, row: Row, plan: Plan) -> Tensor:
        """Tokens to keep, int64[1, 1 or H_kv, K]: ascending, unique, the same K for every head."""

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        kept = []
        for row in rows:
            indices = self.keep(row, plan)
            kept.append((take(row.keys, indices), take(row.values, indices)))
        return Kept(KVBuffer.stack(kept))


def take(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x [1, H, T, D] at indices [1, 1 or H, K] -> [1, H, K, D]."""
    if indices.shape[1] == 1:
        return x.index_select(2, indices[0, 0])
    return x.gather(2, indices[..., None].expand(-1, -1, -1, x.shape[-1]))


def segment_prompt(
    ids: Sequence[Tensor],
    table: NDArray[np.bool_],
    cut: Callable[[NDArray[np.int64], NDArray[np.bool_]], NDArray[np.int64]],
) -> list[Tensor]:
    """Segments of every row by a function of kv-segment: int64[S + 1] on the ids' device."""
    return [torch.from_numpy(cut(row.cpu().numpy(), table)).to(row.device) for row in ids]
