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

from kv_attn_triton import merge_states
from kv_integration.budget import check_budget, split_window
from kv_integration.buffer import KVBuffer
from kv_integration.eviction import take
from kv_integration.history import DEPTH, History
from kv_integration.latest import LatestQueries
from kv_integration.method import Context, LayerState, Method, Plan, Row
from kv_integration.observation import Pooling, check_observation, observed_scores
from kv_integration.offloaded import Offloaded
from kv_integration.retrieval import alone, by_need, stack_rows
from kv_integration.segments import segments
from kv_integration.sentences import (
    SentencePlan,
    punkt_sentences,
    stack_indices,
    stack_offsets,
)
from kv_integration.storable import storable
from kv_offload import storage_bytes
from kv_policies import fill_segments, top_tokens
from kv_score import pool, segment_mean, segment_scores
from kv_segment import DELIMITERS_SENTENCE, by_punctuation


@dataclass(frozen=True)
class SentenceKV(Method):
    """Attend `budget` tokens of the prompt per step, fetched from the host by sentence.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]); the last
            `window` tokens count.
        window: latest tokens, always attended and kept on the device, whose queries score the
            others (N); at most a quarter of the budget.
        keep: tokens kept per token that a step retrieves (r).
        retrieve: `step` looks for sentences at every token (Figure 2), `sentence` when a sentence
            of the answer has ended and at its first token (Algorithm 1).
        sentences: how the prompt is cut: after `punctuation`, or by NLTK's Punkt (`punkt`,
            section 7), which learns abbreviations from the prompt's own text and ends sentences at
            `.`, `?` and `!` only. What is generated ends its sentences by punctuation either way.
        hold: what the host stores: the tokens `kept`, and the others are gone, as in the paper; or
            the whole `prompt`, of which every later turn keeps tokens anew, those that its own last
            `window` queries look at. A step looks for sentences among those kept either way; with
            `keep=1` it attends them all, which suits short answers in many turns.
        per: whether a whole `layer` keeps the same tokens, scored over all heads as in the
            paper, or each `kv_head` its own.
        group: the similarity of a sentence to a KV head is the `mean` or the `max` of its query
            heads'; the paper's models have one query head for each.
        tier: where the stored tokens lie, `host` or `disk`.
        pooling, kernel: how the window's scores are pooled (`observed_scores`). The paper names
            SnapKV's observation window and no pooling; "none" takes it to the letter.

    An input of several tokens, a later turn, attends all that is stored, as the prompt's tokens
    attended all of the prompt; what it is about is then known before sentences are chosen for the
    answer. So do a draft's tokens, of which the last 64 can be taken back: assisted decoding need
    not give the tokens of greedy decoding.
    """

    budget: int | float = 1024
    window: int = 32
    keep: float = 2.0
    retrieve: Literal["step", "sentence"] = "step"
    sentences: Literal["punctuation", "punkt"] = "punctuation"
    hold: Literal["kept", "prompt"] = "kept"
    per: Literal["layer", "kv_head"] = "layer"
    group: Literal["mean", "max"] = "mean"
    tier: Literal["host", "disk"] = "host"
    pooling: Pooling = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_observation(self.window, self.pooling, self.kernel)
        if not 1 <= self.keep < math.inf:
            raise ValueError(f"keep must be finite and at least 1, got {self.keep}")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                wanted = " or ".join(map(repr, known))
                raise ValueError(f"{name} must be {wanted}, got {value!r}")

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        table = context.delimiters(DELIMITERS_SENTENCE)
        if self.sentences == "punkt":
            offsets = [punkt_sentences(row, context) for row in ids]
        else:
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
        alpha = observed_scores(
            row, window, pooling=self.pooling, kernel=self.kernel, reduce=self.per
        )
        kept, kept_offsets = self.kept(alpha, offsets, retrieved)
        keys = take(row.keys, kept[None])
        means = sentence_means(keys, kept_offsets[None])
        if self.hold == "prompt":
            keys, values = row.keys[:, :, :earlier], row.values[:, :, :earlier]
        else:
            values = take(row.values, kept[None])
        return SentenceRow(
            means=means,
            offsets=kept_offsets,
            kept=kept if self.hold == "prompt" else None,
            keys=keys,
            values=values,
            window=(row.keys[:, :, earlier:], row.values[:, :, earlier:]),
            retrieved=retrieved,
            sentences=offsets,
        )

    def kept(self, alpha: Tensor, offsets: Tensor, retrieved: int) -> tuple[Tensor, Tensor]:
        """The r * tau tokens of highest `alpha` [1, L, T], and offsets, as `by_sentence`."""
        count = min(math.ceil(self.keep * retrieved), alpha.shape[2])
        return by_sentence(top_tokens(alpha, count)[0], alpha[0], offsets)


CHOICES = {
    "retrieve": ("step", "sentence"),
    "sentences": ("punctuation", "punkt"),
    "hold": ("kept", "prompt"),
    "per": ("layer", "kv_head"),
    "group": ("mean", "max"),
    "tier": ("host", "disk"),
}


@dataclass(frozen=True)
class SentenceRow:
    """One row's prompt in one layer after compression.

    means: [1, H_kv, S, D], mean key of each sentence's kept tokens (Eq. 1). offsets: int64[1 or
    H_kv, S + 1] of the sentences over the kept tokens, which stand by sentence, in each the most
    important first. kept: int64[1 or H_kv, N], which of the stored ones these are; None when they
    are all. keys, values: [1, H_kv, n, D] of the stored tokens. window: keys and values [1, H_kv,
    w, D] of the latest tokens. retrieved: how many of the N a step reads (tau less the window).
    sentences: int64[S' + 1], offsets of all of the prompt's.
    """

    means: Tensor
    offsets: Tensor
    kept: Tensor | None
    keys: Tensor
    values: Tensor
    window: tuple[Tensor, Tensor]
    retrieved: int
    sentences: Tensor


def sentence_means(keys: Tensor, offsets: Tensor) -> Tensor:
    """Mean [B, H, S, D] of each sentence's keys [B, H, N, D]; offsets int64[B, 1 or H, S + 1]."""
    batch, heads = keys.shape[:2]
    lists = offsets.expand(-1, heads, -1).flatten(0, 1)
    return segment_mean(keys.flatten(0, 1)[:, None], lists).view(batch, heads, -1, keys.shape[3])


def by_sentence(stored: Tensor, alpha: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Stored tokens int64[L, N], by sentence and in each by falling `alpha` [L, T]; their offsets.

    offsets: int64[S + 1] of the prompt's sentences. Returns int64[L, N] and int64[L, S' + 1],
    where sentences of which no list has stored a token have dropped out.
    """
    falling = alpha.gather(-1, stored).argsort(dim=-1, descending=True, stable=True)
    stored = stored.gather(-1, falling)
    sentence = torch.searchsorted(offsets, stored, right=True)
    order = sentence.argsort(dim=-1, stable=True)
    counts = torch.zeros(len(stored), len(offsets) + 1, dtype=torch.int64, device=stored.device)
    counts.scatter_add_(1, sentence, torch.ones_like(sentence))
    counts = counts[:, (counts > 0).any(0)]
    return stored.gather(-1, order), torch.nn.functional.pad(counts.cumsum(-1), (1, 0))


@storable
class SentenceState(LayerState):
    """Sentence means and latest tokens on the device, stored tokens on the host or disk.

    asked: queries, and log of the sum that each attended, of a turn whose tokens are yet to be
    kept.
    """

    def __init__(self, rows: Sequence[SentenceRow], plan: SentencePlan, method: SentenceKV) -> None:
        self.plan, self.method = plan, method
        self.means = stack_rows([row.means[0] for row in rows])
        self.offsets = stack_offsets([row.offsets for row in rows])
        kept = [row.kept for row in rows if row.kept is not None]
        self.kept = stack_indices(kept) if kept else None
        self.sentences = [row.sentences for row in rows]
        self.retrieved = [min(row.retrieved, row.keys.shape[2]) for row in rows]
        self.stored = Offloaded(
            [(row.keys, row.values) for row in rows],
            capacity=max(self.retrieved),
            tier=method.tier,
        )
        self.exact = KVBuffer.stack([row.window for row in rows])
        self.window = [row.window[0].shape[2] for row in rows]
        self.asked = LatestQueries(method.window + DEPTH)
        self.query_sum: Tensor | None = None
        self.selected: Tensor | None = None
        self.history: History[tuple[Tensor | None, Tensor | None]] = History((None, None))

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        self.exact.append(keys, values, valid)
        recent = self.exact.attend(queries, scale=scale)
        turn, stepping = queries.shape[2] > 1, alone(queries, valid)
        if not turn or stepping is not None:
            self._keep_anew(scale)
        held = self.selected
        if turn:
            self.selected = None  # the answer begins with sentences of its own
        query = self._mean_query(queries)
        if max(self.retrieved) == 0:
            return recent[0]

        def chosen(last: Tensor) -> tuple[Tensor, Tensor]:
            indices = self._retrieve(query, held, stepping)
            padded = len(set(self.retrieved)) > 1
            return self.stored.attend_selected(last, indices, scale=scale, padded=padded)

        found = by_need(
            queries,
            stepping,
            whole=lambda queries: self.stored.attend(queries, scale=scale),
            chosen=chosen,
        )
        out, lse = merge_states([recent, found])
        if self.kept is not None and turn:
            several = None if valid is None else valid & (valid.sum(1, keepdim=True) > 1)
            last = slice(max(queries.shape[2] - self.asked.count, 0), None)
            asked = torch.cat([queries[:, :, last].float(), lse[:, :, last, None]], dim=-1)
            self.asked.append(asked, None if several is None else several[:, last])
        return out

    def _keep_anew(self, scale: float) -> None:
        """Keep what the last turn's queries look at, by the rule that held for the prompt's."""
        if self.kept is None or self.asked.empty:
            return
        asked = [self.asked.row(row)[0] for row in range(len(self.retrieved))]
        asked = [row[:, max(row.shape[1] - self.method.window, 0) :] for row in asked]
        self.asked.clear()
        queries, lse = stack_rows(asked).split([self.means.shape[3], 1], dim=-1)
        if lse.shape[2] == 0:
            return
        counts = torch.tensor([row.shape[1] for row in asked], device=lse.device)
        real = torch.arange(lse.shape[2], device=lse.device) < counts[:, None]
        lse = lse[..., 0].masked_fill(~real[:, None], math.inf)
        alpha = self.stored.received(queries, lse, scale=scale)
        if self.method.per == "layer":
            alpha = alpha.mean(1, keepdim=True)
        kept, offsets = list(self.kept), list(self.offsets)
        for row in counts.nonzero()[:, 0].tolist():
            own = alpha[row : row + 1, :, : int(self.stored.store.lengths[row])]
            own = pool(own, self.method.pooling, kernel=self.method.kernel)
            kept[row], offsets[row] = self.method.kept(
                own, self.sentences[row], self.retrieved[row]
            )
        self.kept, self.offsets = stack_indices(kept), stack_offsets(offsets)
        keys = self.stored.keys(self.kept.expand(-1, self.means.shape[1], -1))
        self.means = sentence_means(keys, self.offsets)
        self.history = History((self.query_sum, self.selected))

    def _mean_query(self, queries: Tensor) -> Tensor:
        """Mean query [B, H_q, D] of the sentence that is being generated, these tokens included."""
        batch, heads, _, dim = queries.shape
        carried = self.query_sum
        if carried is None:
            carried = queries.new_zeros(batch, heads * dim, dtype=torch.float32)
        sums = self.plan.running(queries.transpose(1, 2).flatten(2), carried)
        if sums.shape[1] > DEPTH + 1:
            sums = sums[:, -DEPTH - 1 :].clone()  # let go of a long turn's others
        self.history.extend((one, self.selected) for one in sums.unbind(1))
        self.query_sum = sums[:, -1]
        return (self.query_sum / self.plan.count.clamp(min=1)[:, None]).view(batch, heads, dim)

    def _retrieve(self, query: Tensor, held: Tensor | None, stepping: Tensor | None) -> Tensor:
        """Stored tokens of the most similar sentences, int64[B, H_kv, K], as many as granted.

        held: the last selection, -1 or None where a turn came since. stepping: bool[B], the rows
        that take a step if others take a turn.
        """
        similarity = segment_scores(
            query.to(self.means.dtype), self.means, reduce=self.method.group
        )
        indices = fill_segments(similarity, self.offsets, self.retrieved, size=max(self.retrieved))
        if self.kept is not None:
            places = self.kept.expand(-1, indices.shape[1], -1)
            indices = places.gather(2, indices.clamp(min=0)).where(indices >= 0, -1)
        if self.method.retrieve == "sentence" and held is not None:
            anew = self.plan.closed[:, None, None] | (held[..., :1] < 0)
            indices = torch.where(anew, indices, held)
        self.selected = indices if stepping is None else indices.where(stepping[:, None, None], -1)
        self.history.states[-1] = (self.query_sum, self.selected)
        return indices

    def entries(self) -> Tensor:
        attended = [w + r for w, r in zip(self.window, self.retrieved, strict=True)]
        return torch.tensor(attended)[:, None].expand(-1, self.means.shape[1])

    def nbytes(self) -> dict[str, int]:
        tiers = {"device": 0, "host": 0, "disk": 0} | self.stored.nbytes
        kept = [] if self.kept is None else [self.kept]  # `sentences` are the plan's
        own = storage_bytes(self.means, self.offsets, *kept, *self.history.tensors)
        tiers["device"] += own + self.exact.nbytes + self.asked.nbytes
        return tiers

    def crop(self, tokens: int) -> None:
        self.query_sum, self.selected = self.history.back(tokens)
        self.exact.crop(tokens)
        self.asked.crop(tokens)

    def select_rows(self, rows: Tensor) -> None:
        for name in ("means", "offsets", "kept", "query_sum", "selected"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows))
        self.history = History((self.query_sum, self.selected))
        for name in ("window", "retrieved", "sentences"):
            setattr(self, name, [getattr(self, name)[row] for row in rows.tolist()])
        self.stored.select_rows(rows)
        self.exact.select_rows(rows)
        self.asked.select_rows(rows)

    def traffic(self) -> dict[str, int]:
        return self.stored.traffic()
