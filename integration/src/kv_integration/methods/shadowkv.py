"""ShadowKV: low-rank keys and chunk landmarks on the device, values on the host.

Source: "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference", Algorithms 1
and 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kv_attn_triton import landmark_topk, lowrank_attention, merge_states
from kv_integration.budget import budget_entries, check_budget
from kv_integration.buffer import KVBuffer
from kv_integration.eviction import take
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.offloaded import BLOCK
from kv_integration.retrieval import alone, by_need
from kv_integration.storable import storable
from kv_lowrank import LowRank, split_heads, truncated_svd, unrotate
from kv_offload import HitCache, TieredStore, storage_bytes
from kv_score import chunk_mean, chunk_outliers

RANK = 160  # the paper's, for keys of 1,024 channels


@dataclass(frozen=True)
class ShadowKV(Method):
    """Attend `budget` tokens of the prompt per step: chunks whose keys are rebuilt from factors.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]); outlier chunks
            and the latest tokens count. The default is the paper's setting at 128K tokens: 256
            chunks, which are 1.56%, beside 48 outlier chunks and 32 tokens.
        rank: of the keys before RoPE, all KV heads of a layer together (r). None is the paper's
            160, or the width of the keys in a model where that is less. A prompt of fewer tokens
            has factors of that rank.
        chunk: tokens that are scored, and come back, together (C).
        outliers: chunks per KV head that their mean stands for worst, kept exactly on the device.
        outlier_by: what that means. `distance`: the largest of a key of the chunk from the mean,
            which bounds what the mean gets wrong about a logit. `cosine`, the paper's: the lowest
            of a key with the mean, which knows nothing of the length of keys.
        window: latest tokens kept exactly on the device.
        sparse: entries retrieved per step at the most (the paper's sparse budget), a number or a
            share of the prompt such as 1 / 64, rounded up to whole chunks; None for all that the
            budget leaves.
        tier: where the values lie, `host` or `disk`.
        fp8: store factors, landmarks and offloaded values in float8_e5m2 (A.4).

    The tokens at the prompt's end that fill no chunk are exact, too. Where a budget is too small
    for all of this, the window gets at most half of it, and the outlier chunks at most half of the
    chunks that fit into what is left. Where not one chunk fits, the latest tokens get all of the
    budget and the others are forgotten. Chunks of one token have no outliers: nothing is lost in
    their mean.

    Tokens that come together, as those of a later turn or of a draft do, attend all chunks, which
    pass through the device in blocks: assisted decoding need not give the tokens of greedy
    decoding. Algorithm 2 can select for several tokens at once, by the sum of their scores; a
    question that is read with such a selection is asked worse, and answered worse.

    The paper's text says that keys are factored after RoPE in one place and before it in all
    others; it is before. Values of outlier chunks are stored with the others (0.3% more on the
    host), so that a chunk has one number everywhere.
    """

    budget: int | float = 2464
    rank: int | None = None
    chunk: int = 8
    outliers: int = 48
    outlier_by: Literal["distance", "cosine"] = "distance"
    window: int = 32
    sparse: int | float | None = None
    tier: Literal["host", "disk"] = "host"
    fp8: bool = False

    rope: ClassVar[Literal["prompt", "all"]] = "prompt"

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.sparse is not None:
            check_budget(self.sparse, "sparse")
        for name, least in (("rank", 1), ("chunk", 1), ("outliers", 0), ("window", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.tier not in ("host", "disk"):
            raise ValueError(f"tier must be 'host' or 'disk', got {self.tier!r}")
        if self.outlier_by not in ("distance", "cosine"):
            raise ValueError(f"outlier_by must be 'distance' or 'cosine', got {self.outlier_by!r}")

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return ShadowState([self._compress_row(row) for row in rows], rows, self)

    def _compress_row(self, row: Row) -> ShadowRow:
        share = self.share(row.granted(self.budget), row.tokens)
        cut = share.chunks * self.chunk
        keys, values = row.keys[:, :, :cut], row.values[:, :, :cut]
        factors = self._factors(row)
        outliers = chunk_outliers(keys, self.chunk, share.outliers, by=self.outlier_by)
        latest = torch.arange(row.tokens - share.exact, row.tokens, device=keys.device)
        exact = torch.cat(
            [tokens_of(outliers, self.chunk), latest.expand(1, keys.shape[1], -1)], dim=-1
        )
        landmarks = chunk_mean(keys, self.chunk)
        free = torch.ones(landmarks.shape[:3], dtype=torch.bool, device=keys.device)
        return ShadowRow(
            left=factors.left[:, 0, :cut],
            right=factors.right,
            landmarks=landmarks,
            free=free.scatter_(-1, outliers, False),
            values=self.stored(values.unflatten(2, (share.chunks, self.chunk)).flatten(3)),
            exact=(take(row.keys, exact), take(row.values, exact)),
            share=share,
        )

    def _factors(self, row: Row) -> LowRank:
        """Keys before RoPE as left [1, 1, T, r], shared by the heads, and right [1, H_kv, r, D]."""
        keys = row.keys
        heads, width = keys.shape[1], keys.shape[1] * keys.shape[3]
        if row.rope is not None:
            tables = row.rope.row(row.index, slice(row.tokens))
            keys = unrotate(keys, *tables, layout=row.rope.rotation.layout)
        joint = keys.transpose(1, 2).flatten(2)
        return split_heads(truncated_svd(joint, self.rank_of(width)), heads)

    def rank_of(self, width: int) -> int:
        """The rank wanted of keys that have `width` channels in all KV heads together."""
        if self.rank is None:
            return min(RANK, width)
        if self.rank > width:
            raise ValueError(
                f"rank must be at most the {width} channels of all KV heads' keys, got {self.rank}"
            )
        return self.rank

    def share(self, budget: int, tokens: int) -> Share:
        """How `budget` entries are divided among the parts of a prompt."""
        rest = tokens % self.chunk
        most = max(min(self.window + self.chunk - 1, budget // 2), rest)
        tail = most - (most - rest) % self.chunk
        if budget - tail < self.chunk:
            return Share(budget, 0, 0, 0)
        chunks = (tokens - tail) // self.chunk
        fitting = min((budget - tail) // self.chunk, chunks)
        outliers = min(self.outliers, fitting // 2) if self.chunk > 1 else 0
        selected = fitting - outliers
        if self.sparse is not None:
            selected = min(selected, -(-budget_entries(self.sparse, tokens) // self.chunk))
        return Share(tail, chunks, outliers, selected)

    def stored(self, x: Tensor) -> Tensor:
        """`x` in the dtype that it is stored in."""
        return x.to(torch.float8_e5m2) if self.fp8 else x


@storable
class Share(NamedTuple):
    """Parts of a prompt: the `exact` latest tokens, and `chunks` chunks before them.

    outliers, selected: chunks per KV head kept exactly, and retrieved per step.
    """

    exact: int
    chunks: int
    outliers: int
    selected: int


@dataclass(frozen=True)
class ShadowRow:
    """One row's prompt of C chunks in one layer after compression.

    left: [1, C * chunk, r], right: [1, H_kv, r, D], factors of the keys before RoPE. landmarks:
    [1, H_kv, C, D], mean keys after RoPE. free: bool[1, H_kv, C], False for outliers. values:
    [1, H_kv, C, chunk * Dv]. exact: keys and values [1, H_kv, n, D] of outlier chunks, then of the
    latest tokens.
    """

    left: Tensor
    right: Tensor
    landmarks: Tensor
    free: Tensor
    values: Tensor
    exact: tuple[Tensor, Tensor]
    share: Share


@storable
class ShadowState(LayerState):
    """Factors, landmarks, outliers and latest tokens on the device, values on the host or disk.

    Entry n of a row's factors is its token n, and chunk c its tokens c * chunk and following.
    """

    def __init__(self, parts: Sequence[ShadowRow], rows: Sequence[Row], method: ShadowKV) -> None:
        self.method, self.rope = method, rows[0].rope
        self.chunks = max(part.share.chunks for part in parts)
        rank = max(part.left.shape[2] for part in parts)
        size = self.chunks * method.chunk
        self.left = method.stored(_stacked([part.left for part in parts], size, rank))
        self.right = method.stored(
            _stacked([part.right for part in parts], rank, rows[0].keys.shape[3])
        )
        self.landmarks = method.stored(
            _stacked([part.landmarks for part in parts], self.chunks, rows[0].keys.shape[3])
        )
        self.free = torch.cat(
            [F.pad(part.free, (0, self.chunks - part.share.chunks)) for part in parts]
        )
        self.store = TieredStore.ragged([part.values[0] for part in parts], tier=method.tier)
        self.hits = HitCache(self.store, sys.maxsize)  # what it holds is as much as is selected
        self.exact = KVBuffer.stack([part.exact for part in parts])
        self.shares = [part.share for part in parts]
        self.selected = [part.share.selected for part in parts]
        self.streamed = 0  # chunks that later turns read

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        self.exact.append(keys, values, valid)
        if max(self.selected) == 0:
            return self.exact.attend(queries, scale=scale)[0]
        prefetched: Tensor | None = None
        if queries.shape[2] == 1:
            prefetched = self._select(queries, scale)
            self.hits.prefetch(prefetched)  # on CUDA they come while exact entries are attended

        def chosen(last: Tensor) -> tuple[Tensor, Tensor]:
            chunks = self._select(last, scale) if prefetched is None else prefetched
            return self._rebuilt(last, chunks, self.hits.fetch(chunks), scale)

        near = self.exact.attend(queries, scale=scale)
        found = by_need(
            queries,
            alone(queries, valid),
            whole=lambda queries: self._attend_all(queries, scale),
            chosen=chosen,
        )
        return merge_states([near, found])[0]

    def _select(self, queries: Tensor, scale: float) -> Tensor:
        """The best chunks of each KV head for one token: int64[B, H_kv, K], ascending, -1 last."""
        rows = [slice(None)]
        if len(set(self.selected)) > 1:
            rows = [slice(row, row + 1) for row in range(len(self.selected))]
        best = [
            landmark_topk(
                queries[row],
                self.landmarks[row, :, : self.chunks].to(queries.dtype),
                count,
                mask=self.free[row, :, : self.chunks],
                scale=scale,
            )
            for row, count in zip(rows, self.selected, strict=False)
        ]
        longest = max(self.selected)
        return torch.cat([F.pad(one, (0, longest - one.shape[2]), value=-1) for one in best])

    def _attend_all(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over all chunks but the outliers, which pass through the device in blocks."""
        free = self.free[:, :, : self.chunks]
        order = free.sort(dim=-1, descending=True, stable=True).indices
        counts = free.sum(-1, keepdim=True)
        order = order.where(torch.arange(self.chunks, device=order.device) < counts, -1)
        self.streamed += int(counts.sum())
        parts = []
        for chunks in order[..., : int(counts.max())].split(max(BLOCK // self.method.chunk, 1), -1):
            parts.append(self._rebuilt(queries, chunks, self.store.gather(chunks), scale))
        return merge_states(parts)

    def _rebuilt(
        self, queries: Tensor, chunks: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention over these chunks, `values` [B, H_kv, K, chunk * Dv], by rebuilt keys."""
        size = self.method.chunk
        tokens = tokens_of(chunks, size)
        values = values.unflatten(3, (size, -1)).flatten(2, 3)
        left, (cos, sin) = self.left[:, : self.chunks * size], self._tables(queries)
        if self.method.fp8:
            left, cos, sin, tokens = _picked(left, cos, sin, tokens, queries.dtype)
        return lowrank_attention(
            queries,
            left,
            self.right.to(queries.dtype),
            values.to(queries.dtype),
            tokens,
            cos,
            sin,
            interleaved=self.rope is not None and self.rope.interleaved,
            values_gathered=True,
            scale=scale,
        )

    def _tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1 or B, N, R] of the entries that have factors."""
        entries = self.chunks * self.method.chunk
        if self.rope is None:
            still = like.new_ones(1, 1, 2).expand(1, entries, 2)
            return still, like.new_zeros(1, 1, 2).expand(1, entries, 2)
        return self.rope.cos[:, :entries], self.rope.sin[:, :entries]

    def entries(self) -> Tensor:
        attended = [
            share.exact + (share.outliers + share.selected) * self.method.chunk
            for share in self.shares
        ]
        return torch.tensor(attended)[:, None].expand(-1, self.free.shape[1])

    def nbytes(self) -> dict[str, int]:
        tiers = {"device": 0, "host": 0, "disk": 0} | self.store.nbytes
        own = storage_bytes(self.left, self.right, self.landmarks, self.free)
        tiers["device"] += own + self.exact.nbytes + self.hits.nbytes
        return tiers

    def crop(self, tokens: int) -> None:
        self.exact.crop(tokens)

    def select_rows(self, rows: Tensor) -> None:
        for name in ("left", "right", "landmarks", "free"):
            setattr(self, name, _rows_of(getattr(self, name), rows))
        for name in ("shares", "selected"):
            setattr(self, name, [getattr(self, name)[row] for row in rows.tolist()])
        self.store.select_rows(rows)
        self.exact.select_rows(rows)

    @property
    def _chunk_bytes(self) -> int:
        return self.store.shape[3] * self.store.dtype.itemsize

    def traffic(self) -> dict[str, int]:
        moved = self.hits.misses + self.hits.prefetched
        asked = self.hits.hits + self.hits.misses
        return {
            "bytes_moved": self.hits.bytes_moved + self.streamed * self._chunk_bytes,
            "hits": (asked - moved) * self.method.chunk,
            "misses": moved * self.method.chunk,
        }


def tokens_of(chunks: Tensor, size: int) -> Tensor:
    """Tokens of chunks [B, H, K], -1 for none: int64[B, H, K * size]."""
    tokens = chunks[..., None] * size + torch.arange(size, device=chunks.device)
    return tokens.masked_fill_(chunks[..., None] < 0, -1).flatten(2)


def _stacked(rows: Sequence[Tensor], length: int, width: int) -> Tensor:
    """Rows [1, ..., n, d] as one tensor [B, ..., length, width], the rest of each 0."""
    return torch.cat(
        [F.pad(row, (0, width - row.shape[-1], 0, length - row.shape[-2])) for row in rows]
    )


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of a batch, of any dtype: torch selects none of float8."""
    if x.dtype == torch.float8_e5m2:
        return x.view(torch.uint8).index_select(0, rows).view(x.dtype)
    return x.index_select(0, rows)


def _picked(
    left: Tensor, cos: Tensor, sin: Tensor, tokens: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows at `tokens` [B, H, K] in `dtype`, head after head, and where they now are.

    So only what a step reads is turned back from float8.
    """
    batch, heads, count = tokens.shape
    place = tokens.clamp(min=0).flatten(1)

    def rows(x: Tensor) -> Tensor:
        words = x.view(torch.uint8) if x.dtype == torch.float8_e5m2 else x
        words = words.expand(batch, -1, -1)
        at = place[..., None].expand(-1, -1, words.shape[2])
        return words.gather(1, at).view(x.dtype).to(dtype if x is left else x.dtype)

    own = torch.arange(heads * count, device=tokens.device).view(1, heads, count)
    return rows(left), rows(cos), rows(sin), own.masked_fill(tokens < 0, -1)
