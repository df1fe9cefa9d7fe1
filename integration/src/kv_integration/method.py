"""What a method is: it looks at a layer's prompt once and leaves a state that decoding attends to.

A method that only chooses tokens subclasses `Eviction` (eviction.py) and writes `keep`. One that
stores entries in other ways subclasses `Method` and returns its own `LayerState`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kv_integration.budget import budget_entries
from kv_integration.rope import RopeTables, Rotation
from kv_integration.storable import storable
from kv_integration.surprise import LMHead
from kv_offload import storage_bytes
from kv_segment import delimiter_table


class Context:
    """What a method may ask about the model's surroundings: delimiter tables of the tokenizer.

    rotations: by a layer's index, how it turns its keys; filled when a method first wants to know.
    head: the model's LM head, through which the prompt's surprisal is found; None without one.
    """

    def __init__(self, tokenizer: object | None, head: LMHead | None = None) -> None:
        self.tokenizer, self.head = tokenizer, head
        self._tables: dict[tuple[str, ...], NDArray[np.bool_]] = {}
        self.rotations: dict[int, Rotation | None] = {}

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


@storable
@dataclass
class Plan:
    """What all layers share about one prompt: segments and whatever decoding must follow.

    offsets: one int64[S + 1] per row, over that row's tokens without padding.
    """

    offsets: list[Tensor] = field(default_factory=list)
    recompress: bool = False

    def settle(self, *, recompress: bool) -> None:
        """Told once, after `begin`: whether what comes after the prompt will be compressed, too."""
        self.recompress = recompress

    def finish(self, surprisal: Sequence[Tensor]) -> None:
        """Told once, before any `compress`, if the method `needs_surprisal`: float32[T_b] per row,
        -log p of each of the prompt's tokens in nats, 0 for the first, which nothing predicts."""

    def compressed(self) -> None:
        """Told once, if the method `needs_surprisal`: all layers have compressed the prompt."""

    def of(self, row: Row) -> Tensor:
        """Segments of a row's entries, int64[S + 1]."""
        return self.offsets[row.index]

    def advance(self, ids: Tensor, valid: Tensor | None) -> None:
        """Tokens [B, Q] enter the model after the prompt (`valid` [B, Q]: not padding)."""

    def crop(self, tokens: int) -> None:
        """The last `tokens` tokens, all of which came after the prompt, are forgotten."""

    def select_rows(self, rows: Tensor) -> None:
        """Rows of the batch are reordered, repeated or dropped, as `KVBuffer.select_rows`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that exist."""
        return storage_bytes(*self.offsets)


@dataclass(frozen=True)
class Row:
    """One row of a layer to be compressed, its padding removed: its prompt, or what is left of it.

    queries: [1, H_q, N, D], those of the last N tokens, N at most what the method observes.
    keys, values: [1, H_kv, T, D], the keys after RoPE. scale: of the dot products.
    layer, layers: number of this compressed layer, and how many there are. received: float32[1,
    H_kv, T], what each key received from all queries, the mean of its group; only for a method that
    `accumulates`, and None where the prompt came in pieces or waited for its surprisal, or the
    layer is compressed again. rope: cos and sin by which the keys were turned, if the method asks
    for them and the layer turns keys at all.

    When a layer is compressed again, the entries are those kept before, then the tokens that came
    since. seen: tokens of the row so far. positions: int64[1, 1 or H_kv, T], the token of each
    entry, -1 for padding where heads hold unequal numbers of entries. log_size: float32[1, H_kv,
    T], log of the tokens that an entry stands for.
    """

    index: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    layer: int = 0
    layers: int = 1
    seen: int = 0
    positions: Tensor | None = None
    log_size: Tensor | None = None
    received: Tensor | None = None
    rope: RopeTables | None = None

    @property
    def tokens(self) -> int:
        """Entries: as many as tokens while nothing was compressed."""
        return self.keys.shape[2]

    def granted(self, budget: int | float) -> int:
        """Entries that `budget` grants of the tokens seen, at most those there are."""
        return min(budget_entries(budget, max(self.seen, self.tokens)), self.tokens)


class Recalled(NamedTuple):
    """A row's entries, as `Row` wants them."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_size: Tensor | None


class LayerState(ABC):
    """What one layer holds after its prompt was compressed, and how a step reads it.

    looks_ahead: whether it wants to be told by `expect`, before a decoding step comes to it, about
    which query it will be asked.
    """

    looks_ahead: bool = False

    def expect(self, queries: Tensor, *, scale: float) -> None:
        """The layer before has begun its step; `queries` [B, H_q, 1, D] are what its input makes
        of this layer's projections: a guess at what `step` will be given."""
        raise TypeError(f"{type(self).__name__} does not look ahead")

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

    def recall(self, row: int, seen: int) -> Recalled:
        """All entries of one row, `seen` tokens of which came so far, to be compressed again."""
        raise ValueError(f"{type(self).__name__} cannot be compressed again")

    def details(self) -> dict[str, Any]:
        """Figures of this method's own for the report, as plain numbers and lists."""
        return {}

    def traffic(self) -> dict[str, int]:
        """Counts since the prompt: `bytes_moved` between tiers, `hits` and `misses` in entries."""
        return {"bytes_moved": 0, "hits": 0, "misses": 0}


class Method(ABC):
    """A way to hold the prompt. Methods are immutable; all state lives in the cache."""

    budget: int | float = 1.0
    recompresses: bool = False  # whether `compress` takes rows that were compressed before
    observe: int = 0  # how many of the prompt's last queries `compress` wants
    accumulates: bool = False  # whether it wants `Row.received` from the prompt's own attention
    # of which tokens it wants cos and sin
    rope: ClassVar[Literal["prompt", "all"] | None] = None
    # Whether the plan wants the prompt's surprisal: all layers hold the prompt until the model
    # has seen its last token, and compress then.
    needs_surprisal: bool = False

    @property
    def name(self) -> str:
        """Name in reports and on the command line."""
        return type(self).__name__.lower()

    @property
    def holds_rope(self) -> bool:
        """Whether cos and sin in the cache are there for this method, and count as its bytes."""
        return self.rope is not None

    def bound(self, model: PreTrainedModel) -> Method:
        """This method with what it has in a file for `model`; called when a cache is made."""
        return self

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        """Look at the prompt's token ids, int64[T_b] per row, once for all layers."""
        return Plan()

    @abstractmethod
    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        """Make one layer's state from its prompt."""
