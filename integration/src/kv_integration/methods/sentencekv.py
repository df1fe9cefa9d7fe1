"""SentenceKV: sentence means on the device, tokens on the host, retrieved by sentence.

Source: "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching", Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kv_attn_triton import attention, merge_states
from kv_integration.budget import check_budget, split_window
from kv_integration.buffer import KVBuffer
from kv_integration.eviction import take
from kv_integration.method import Context, LayerState, Method, Plan, Row
from kv_integration.observation import Pooling, check_observation, observed_scores
from kv_integration.segments import segments
from kv_integration.storable import storable
from kv_offload import HitCache, TieredStore, storage_bytes
from kv_policies import top_segments, top_tokens
from kv_score import segment_mean, segment_scores
from kv_segment import DELIMITERS_SENTENCE, by_punctuation


@dataclass(frozen=True)
class SentenceKV(Method):
    """Attend `budget` tokens of the prompt per step, fetched from the host by sentence.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]); the last
            `window` tokens count.
        window: latest tokens, always attended and kept on the device, whose queries score the
            others (N); at most a quarter of the budget.
        keep: tokens stored per token that a step retrieves (r).
        retrieve: `step` looks for sentences at every token (Figure 2), `sentence` when a sentence
            of the answer has ended and at its first token (Algorithm 1).
        tier: where the stored tokens lie, `host` or `disk`.
        pooling, kernel: how the window's scores are pooled (`observed_scores`). The paper names
            SnapKV's observation window and no pooling; "none" takes it to the letter.
    """

    budget: int | float = 1024
    window: int = 32
    keep: float = 2.0
    retrieve: Literal["step", "sentence"] = "step"
    tier: Literal["host", "disk"] = "host"
    pooling: Pooling = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_observation(self.window, self.pooling, self.kernel)
        if not self.keep >= 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")
        if self.retrieve not in ("step", "sentence"):
            raise ValueError(f"retrieve must be 'step' or 'sentence', got {self.retrieve!r}")
        if self.tier not in ("host", "disk"):
            raise ValueError(f"tier must be 'host' or 'disk', got {self.tier!r}")

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        table = context.delimiters(DELIMITERS_SENTENCE)
        offsets = [segments(row, table, by_punctuation) for row in ids]
        return SentencePlan(offsets, torch.from_numpy(table).to(ids[0].device), len(ids))

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        if not isinstance(plan, SentencePlan):
            raise TypeError(f"plan must be the one that begin() made, got {plan!r}")
        parts = [self._compress_row(row, plan.offsets[row.index]) for row in rows]
        return SentenceState(parts, plan, self)

    def _compress_row(self, row: Row, offsets: Tensor) -> SentenceRow:
        budget = row.granted(self.budget)
        window, retrieved = split_window(budget, self.window)
        earlier = row.tokens - window
        alpha = observed_scores(row, window, pooling=self.pooling, kernel=self.kernel)
        stored = top_tokens(alpha, min(math.ceil(self.keep * retrieved), earlier))
        keys, values = take(row.keys, stored), take(row.values, stored)
        kept_offsets = offsets_of_kept(stored[0, 0], offsets)
        return SentenceRow(
            means=segment_mean(keys, kept_offsets),
            offsets=kept_offsets,
            alpha=alpha.gather(-1, stored),
            entries=torch.cat([keys, values], dim=-1),
            window=(row.keys[:, :, earlier:], row.values[:, :, earlier:]),
            retrieved=retrieved,
        )


@dataclass(frozen=True)
class SentenceRow:
    """One row's prompt in one layer after compression.

    means: [1, H_kv, S, D], mean key of each sentence's stored tokens (Eq. 1). offsets: int64[S + 1]
    of the sentences over the stored tokens. alpha: float32[1, 1, N], their importance. entries:
    [1, H_kv, N, 2 D], keys beside values. window: keys and values [1, H_kv, w, D] of the latest
    tokens. retrieved: how many of the N a step reads (tau less the window).
    """

    means: Tensor
    offsets: Tensor
    alpha: Tensor
    entries: Tensor
    window: tuple[Tensor, Tensor]
    retrieved: int


def offsets_of_kept(kept: Tensor, offsets: Tensor) -> Tensor:
    """Sentences over the kept tokens: int64[K] positions -> int64[S' + 1]; empty ones drop out."""
    before = torch.searchsorted(kept, offsets)
    return torch.unique_consecutive(before)


@storable
class SentencePlan(Plan):
    """Sentences of the prompt, and where the sentence that is being generated began.

    weights: bool[B, Q], which of the tokens that just came belong to the current sentence;
    fresh: bool[B], whether it began among them; closed: bool[B], whether it has ended.
    """

    def __init__(self, offsets: list[Tensor], table: Tensor, batch: int) -> None:
        super().__init__(offsets)
        self.table = table
        self.closed = torch.zeros(batch, dtype=torch.bool, device=table.device)
        self.fresh = self.closed
        self.weights = self.closed[:, None]

    def advance(self, ids: Tensor, valid: Tensor | None) -> None:
        ends = self.table[ids]
        if valid is not None:
            ends = torch.where(valid, ends, self.closed[:, None])
        previous = torch.cat([self.closed[:, None], ends[:, :-1]], dim=1)
        begins = previous & ~ends
        place = torch.arange(ids.shape[1], device=ids.device)
        start = torch.where(begins, place, -1).amax(dim=1, keepdim=True)
        self.weights = place >= start
        if valid is not None:
            self.weights = self.weights & valid
        self.fresh = start[:, 0] >= 0
        self.closed = ends[:, -1]

    def select_rows(self, rows: Tensor) -> None:
        self.closed = self.closed.index_select(0, rows.to(self.closed.device))

    @property
    def nbytes(self) -> int:
        return storage_bytes(*self.offsets, self.table, self.closed, self.fresh, self.weights)


@storable
class SentenceState(LayerState):
    """Sentence means and latest tokens on the device, stored tokens on the host or disk."""

    def __init__(self, rows: Sequence[SentenceRow], plan: SentencePlan, method: SentenceKV) -> None:
        self.plan, self.method = plan, method
        self.alpha = stack_padded([row.alpha for row in rows], dim=2, fill=-math.inf)
        longest = self.alpha.shape[2]
        # Rows of fewer tokens or sentences end in segments of forbidden tokens.
        ends = [F.pad(row.offsets[None], (0, 1), value=longest) for row in rows]
        self.offsets = stack_padded(ends, dim=1, fill=longest)
        means = [F.pad(row.means, (0, 0, 0, 1)) for row in rows]
        self.means = stack_padded(means, dim=2)
        self.stored = [row.alpha.shape[2] for row in rows]
        self.retrieved = [row.retrieved for row in rows]
        self.store = TieredStore.ragged([row.entries[0] for row in rows], tier=method.tier)
        self.hits = HitCache(self.store, max(*self.retrieved, 1))
        self.exact = KVBuffer.stack([row.window for row in rows])
        self.window = [row.window[0].shape[2] for row in rows]
        self.query_sum: Tensor | None = None
        self.query_count = self.means.new_zeros(len(rows), dtype=torch.float32)
        self.selected: Tensor | None = None

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        self.exact.append(keys, values, valid)
        recent = self.exact.attend(queries, scale=scale)
        if self.store.shape[2] == 0:
            return recent[0]
        indices = self._retrieve(self._mean_query(queries))
        rows = self.hits.fetch(indices)
        dim = keys.shape[-1]
        found = attention(
            queries,
            rows[..., :dim],
            rows[..., dim:],
            lengths=(indices >= 0).sum(-1, dtype=torch.int32),
            scale=scale,
        )
        return merge_states([recent, found])[0]

    def _mean_query(self, queries: Tensor) -> Tensor:
        """Mean query [B, H_q, D] of the sentence that is being generated, these tokens included."""
        weights = self.plan.weights.to(torch.float32)
        total = torch.einsum("bhqd,bq->bhd", queries.float(), weights)
        count = weights.sum(dim=1)
        if self.query_sum is not None:
            carried = (~self.plan.fresh).float()
            total = total + self.query_sum * carried[:, None, None]
            count = count + self.query_count * carried
        self.query_sum, self.query_count = total, count
        return total / count.clamp(min=1)[:, None, None]

    def _retrieve(self, query: Tensor) -> Tensor:
        """Stored tokens of the most similar sentences, int64[B, H_kv, K], as many as granted."""
        similarity = segment_scores(query.to(self.means.dtype), self.means, reduce="mean")
        alpha = self.alpha.expand(-1, similarity.shape[1], -1)
        indices = top_segments(similarity, alpha, self.offsets, self.retrieved, check=False)
        if self.method.retrieve == "sentence" and self.selected is not None:
            indices = torch.where(self.plan.closed[:, None, None], indices, self.selected)
        self.selected = indices
        return indices

    def entries(self) -> Tensor:
        attended = [
            window + min(stored, retrieved)
            for window, stored, retrieved in zip(
                self.window, self.stored, self.retrieved, strict=True
            )
        ]
        return torch.tensor(attended)[:, None].expand(-1, self.means.shape[1])

    def nbytes(self) -> dict[str, int]:
        own = [self.means, self.offsets, self.alpha, self.query_count]
        own += [t for t in (self.query_sum, self.selected) if t is not None]
        tiers = {"device": 0, "host": 0, "disk": 0} | self.store.nbytes
        tiers["device"] += storage_bytes(*own) + self.exact.nbytes + self.hits.nbytes
        return tiers

    def crop(self, tokens: int) -> None:
        raise ValueError(
            f"SentenceKV cannot crop {tokens} tokens: the mean query of the sentence that is being "
            "generated cannot be taken back"
        )

    def select_rows(self, rows: Tensor) -> None:
        for name in ("means", "offsets", "alpha", "query_sum", "query_count", "selected"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows))
        for name in ("stored", "window", "retrieved"):
            setattr(self, name, [getattr(self, name)[row] for row in rows.tolist()])
        self.store.select_rows(rows)
        self.exact.select_rows(rows)

    def traffic(self) -> dict[str, int]:
        return {
            "bytes_moved": self.hits.bytes_moved,
            "hits": self.hits.hits,
            "misses": self.hits.misses,
        }


def stack_padded(rows: Sequence[Tensor], *, dim: int, fill: float = 0.0) -> Tensor:
    """Rows [1, ...] of unequal size along `dim` as one tensor, the shorter ones filled up."""
    longest = max(row.shape[dim] for row in rows)
    padded = []
    for row in rows:
        shape = [*row.shape[:dim], longest - row.shape[dim], *row.shape[dim + 1 :]]
        padded.append(torch.cat([row, row.new_full(shape, fill)], dim=dim))
    return torch.cat(padded)
