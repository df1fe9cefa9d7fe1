"""Sentences: those of the prompt, and the one that is being generated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kv_integration.history import DEPTH, History
from kv_integration.method import Context, Plan
from kv_integration.storable import storable
from kv_offload import storage_bytes
from kv_segment import sentences, token_texts


@storable
class SentencePlan(Plan):
    """Sentences of the prompt, and where the sentence that is being generated began.

    start: int64[B, Q], of each token that just came the latest of them that began a sentence, up
    to itself; -1 if that was before. valid: bool[B, Q] or None, as `advance` was given. closed:
    bool[B], whether the sentence has ended. count: float32[B], its tokens so far.
    """

    def __init__(self, offsets: list[Tensor], table: Tensor, batch: int) -> None:
        super().__init__(offsets)
        self.table = table
        self.closed = torch.zeros(batch, dtype=torch.bool, device=table.device)
        self.count = torch.zeros(batch, device=table.device)
        self.start = self.closed.new_zeros(batch, 0, dtype=torch.int64)
        self.valid: Tensor | None = None
        self.history = History((self.closed, self.count))

    def advance(self, ids: Tensor, valid: Tensor | None) -> None:
        ends = self.table[ids]
        if valid is not None:
            ends = torch.where(valid, ends, self.closed[:, None])
        previous = torch.cat([self.closed[:, None], ends[:, :-1]], dim=1)
        place = torch.arange(ids.shape[1], device=ids.device)
        self.start = torch.where(previous & ~ends, place, -1).cummax(dim=1).values
        self.valid = valid
        counts = self.running(torch.ones_like(ends)[..., None], self.count[:, None])[..., 0]
        if ids.shape[1] > DEPTH + 1:
            ends, counts = (x[:, -DEPTH - 1 :].clone() for x in (ends, counts))
        self.closed, self.count = ends[:, -1], counts[:, -1]
        self.history.extend(zip(ends.unbind(1), counts.unbind(1), strict=True))

    def running(self, x: Tensor, carried: Tensor) -> Tensor:
        """Sums over the sentence so far at each token that just came: float32[B, Q, F].

        x: [B, Q, F] of these tokens; carried: [B, F], the sum before the first of them.
        """
        x = x.float()
        if self.valid is not None:
            x = x.masked_fill(~self.valid[..., None], 0.0)
        begun = self.start[..., None]
        if x.shape[1] == 1:
            return x + torch.where(begun < 0, carried[:, None], 0.0)
        total = x.cumsum(dim=1)
        before = F.pad(total, (0, 0, 1, 0)).gather(1, begun.clamp(min=0).expand_as(x))
        return total - before + torch.where(begun < 0, carried[:, None], 0.0)

    def crop(self, tokens: int) -> None:
        self.closed, self.count = self.history.back(tokens)

    def select_rows(self, rows: Tensor) -> None:
        rows = rows.to(self.closed.device)
        self.closed, self.count = self.closed[rows], self.count[rows]
        self.history = History((self.closed, self.count))

    @property
    def nbytes(self) -> int:
        own = [*self.offsets, self.table, self.start, *self.history.tensors]
        return storage_bytes(*own)


def punkt_sentences(ids: Tensor, context: Context) -> Tensor:
    """Sentences of one row's tokens by Punkt, which learns from their text: int64[S + 1].

    Raises:
        ValueError: the model was attached without a tokenizer.
        TypeError: the tokenizer cannot decode.
    """
    if context.tokenizer is None:
        raise ValueError(
            "sentences='punkt' reads the text of the prompt and needs the tokenizer: "
            "use attach(model, tokenizer)"
        )
    texts = token_texts(context.tokenizer, ids.cpu().numpy())
    ends = np.cumsum([len(text) for text in texts])
    spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    # Untrained Punkt ends a sentence after every "Dr."; there is no data to take it from but these.
    offsets = sentences("".join(texts), spans, train_on_text=True)
    return torch.from_numpy(offsets).to(ids.device)


def stack_offsets(rows: Sequence[Tensor]) -> Tensor:
    """Offsets int64[L, S_b + 1] as [B, L, S + 1]: shorter rows end in empty segments."""
    longest = max(row.shape[1] for row in rows)
    return torch.stack(
        [torch.cat([row, row[:, -1:].expand(-1, longest - row.shape[1])], 1) for row in rows]
    )


def stack_indices(rows: Sequence[Tensor]) -> Tensor:
    """Indices int64[L, n_b] as [B, L, n]: shorter rows end in -1."""
    longest = max(row.shape[1] for row in rows)
    return torch.stack([F.pad(row, (0, longest - row.shape[1]), value=-1) for row in rows])
