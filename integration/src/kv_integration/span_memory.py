"""A prompt in two resolutions: exact tokens and span means, and the tokens of chosen spans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kv_attn_triton import attention, merge_states
from kv_integration.buffer import KVBuffer
from kv_integration.method import LayerState
from kv_integration.retrieval import stack_rows
from kv_integration.routing import Routing
from kv_integration.span_store import SpanStore
from kv_integration.storable import storable
from kv_lowrank import PackedSpans
from kv_offload import storage_bytes
from kv_policies import select_spans

BLOCK = 8  # queries of one forward pass that choose their spans at a time
# Tensors of `SpanMemory` with a row per row of the batch; the latter only where spans are routed.
HELD, ROUTED = ("keys", "values", "log_size"), ("summaries", "cost", "bias", "fitting")
State = tuple[Tensor, Tensor]  # out and lse
Lists = list[list[list[int]]]  # spans of each query (a row of its own) and KV head


@dataclass(frozen=True)
class RoutedSpans:
    """What it takes to expand a row's spans.

    summaries: [1, H_r, S, d'], routing keys. factors: of the spans' keys and of their values; None
    where the row has no span.
    """

    routing: Routing
    summaries: Tensor
    factors: tuple[PackedSpans, PackedSpans] | None


@dataclass(frozen=True)
class SpanRow:
    """One row's prompt in one layer after compression.

    exact: keys and values [1, H_kv, A, D] that stay as they are. means: of each span's keys and
    values [1, H_kv, S, D]. sizes: int64[S], tokens of each span. room: entries that a step
    has left for expanded tokens, their spans' means spared. routed: None where no span of the
    batch is ever expanded.
    """

    exact: tuple[Tensor, Tensor]
    means: tuple[Tensor, Tensor]
    sizes: Tensor
    room: int
    routed: RoutedSpans | None


@storable
class SpanMemory(LayerState):
    """What SeKV holds of a layer: exact tokens, span means and routing keys on the device, factors
    of the spans in a `SpanStore`, and the tokens that came after the prompt.

    looks_ahead: whether the layer before may say which query is to be expected. What a step attends
    is chosen by its own query all the same.
    """

    def __init__(
        self,
        rows: Sequence[SpanRow],
        *,
        query_heads: int,
        tier: Literal["host", "disk"],
        looks_ahead: bool = False,
    ) -> None:
        device, heads = rows[0].sizes.device, rows[0].exact[0].shape[1]
        self.exact = KVBuffer.stack([row.exact for row in rows])
        self.keys, self.values = (stack_rows([row.means[i][0] for row in rows]) for i in (0, 1))
        sizes = stack_rows([row.sizes[None, :, None] for row in rows])[:, 0, :, 0]
        self.log_size = sizes.log()  # -inf where a row has no further span
        self.room = [row.room for row in rows]
        # What follows is on the host, which moves spans: those of KV head h of row b are numbered
        # from first[b][h] on in the store.
        self.costs = [(row.sizes - 1).tolist() for row in rows]
        counts = [len(costs) for costs in self.costs]
        starts = [heads * sum(counts[:row]) for row in range(len(rows))]
        self.first = [
            [start + head * count for head in range(heads)]
            for start, count in zip(starts, counts, strict=True)
        ]
        self.resident = [row.exact[0].shape[2] + len(row.sizes) for row in rows]
        # For the report. A step waits for nothing that is counted on the device.
        self.attended = [[resident] * heads for resident in self.resident]
        self.requested = 0
        self.zoomed = torch.zeros(query_heads, dtype=torch.int64, device=device)
        self.asked = self.zoomed.new_zeros(())
        routed = [row.routed for row in rows if row.routed is not None]
        self.store: SpanStore | None = None
        self.looks_ahead = looks_ahead and bool(routed)
        if routed:
            self._route(routed, sizes, tier)

    def _route(
        self, rows: Sequence[RoutedSpans], sizes: Tensor, tier: Literal["host", "disk"]
    ) -> None:
        """Hold what it takes to expand spans of `sizes` int64[B, S], 0 where there is none."""
        self.routing = Routing.stack([row.routing for row in rows])
        self.summaries = stack_rows([row.summaries[0] for row in rows])
        self.cost = (sizes - 1).clamp(min=0)
        room = torch.tensor(self.room, device=sizes.device)[:, None]
        # A span that never fits must not stand in the way of those that do.
        fits = (sizes > 0) & (self.cost <= room)
        self.bias = self.log_size.masked_fill(~fits, -math.inf)
        self.fitting = fits.sum(1)
        self.longest = int(sizes.masked_fill(~fits, 0).amax())
        # A step expands no more spans than there is room for if they are the shortest.
        spent = self.cost.masked_fill(~fits, max(self.room) + 1).sort().values.cumsum(1)
        self.most = int((spent <= room).sum(1).amax())
        held = [row.factors for row in rows if row.factors is not None]
        self.store = SpanStore(held, tier=tier, device=sizes.device)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        self.exact.append(keys, values, valid)
        parts = [self.exact.attend(queries, scale=scale)]
        if self.store is None:
            log_size = self.log_size[:, None].expand(self.keys.shape[:3])
            means = attention(queries, self.keys, self.values, log_size=log_size, scale=scale)
            parts.append(means)
        else:
            batch, _, count, _ = queries.shape
            blocks = [
                self._attend_spans(
                    queries[:, :, first : first + BLOCK],
                    None if valid is None else valid[:, first : first + BLOCK],
                    self.store,
                    scale,
                )
                for first in range(0, count, BLOCK)
            ]
            parts += blocks[0] if count == 1 else [_joined(blocks, batch)]
        return merge_states(parts)[0]

    def _attend_spans(
        self, queries: Tensor, valid: Tensor | None, store: SpanStore, scale: float
    ) -> list[State]:
        """Means of the spans, and tokens of those that a query expands.

        queries: [B, H_q, Q, D]. Each query is a row of its own here and in what is returned,
        [B * Q, H_q, 1, D], for it has spans of its own.
        """
        count = queries.shape[2]

        def each(x: Tensor) -> Tensor:
            return x if count == 1 else x.repeat_interleave(count, 0)

        gates = self._gates(queries, valid)
        chosen = self._choose(gates, count)
        expanded = _mask(chosen, gates.shape[2])
        self._count_zooms(gates, expanded, valid)
        rows = queries.transpose(1, 2).flatten(0, 1).unsqueeze(2)
        log_size = each(self.log_size)[:, None].masked_fill(expanded, -math.inf)
        keys, values = each(self.keys), each(self.values)
        parts = [attention(rows, keys, values, log_size=log_size, scale=scale)]
        lists = _without_padding(chosen)
        self._count_tokens(lists, count)
        wanted = self._numbers(lists, count)
        if any(wanted):
            slots = store.fetch(wanted).view(len(rows), keys.shape[1], -1)
            parts.append(store.attend(rows, slots, longest=self.longest, scale=scale))
        return parts

    def expect(self, queries: Tensor, *, scale: float) -> None:
        """Fetch the spans that such queries would expand."""
        if self.store is not None:
            chosen = self._choose(self._gates(queries, None), 1)
            self.store.prefetch(self._numbers(_without_padding(chosen), 1))

    def _gates(self, queries: Tensor, valid: Tensor | None) -> Tensor:
        """Logits of the spans' relevance [B * Q, H_q, S], -inf where none can be expanded."""
        gates = self.routing.logits(queries, self.summaries, self.bias)
        if valid is not None:
            gates = gates.masked_fill(~valid[:, None, :, None], -math.inf)
        return gates.transpose(1, 2).flatten(0, 1)

    def _choose(self, gates: Tensor, count: int) -> Tensor:
        """Spans that each of `count` queries per row expands, int64[B * Q, H_kv, E], -1 padded."""
        return select_spans(
            gates,
            self._thresholds(count),
            self.cost if count == 1 else self.cost.repeat_interleave(count, 0),
            [room for room in self.room for _ in range(count)],
            kv_heads=self.keys.shape[1],
            most=self.most,
            check=False,
        )

    def _thresholds(self, count: int) -> Tensor:
        """float32[H_q], or [B * Q, H_q] where rows have their own."""
        threshold = self.routing.threshold
        return threshold[0] if self.routing.shared else threshold.repeat_interleave(count, 0)

    def _numbers(self, lists: Lists, count: int) -> list[list[int]]:
        """The store's numbers of the spans in `lists`, those of each query and KV head."""
        return [
            [first + span for span in spans]
            for query, heads in enumerate(lists)
            for first, spans in zip(self.first[query // count], heads, strict=True)
        ]

    def _count_zooms(self, gates: Tensor, expanded: Tensor, valid: Tensor | None) -> None:
        """For the report's zoom-in rates."""
        count, heads = len(gates) // len(self.room), expanded.shape[1]
        fired = gates > self._thresholds(count)[..., None]
        both = fired.unflatten(1, (heads, -1)) & expanded[:, :, None]
        self.zoomed += both.sum((0, 3)).flatten()
        self.asked += (self.fitting * (count if valid is None else valid.sum(1))).sum()

    def _count_tokens(self, lists: Lists, count: int) -> None:
        """Tokens that are asked for, and entries that are attended with them."""
        for query, heads in enumerate(lists):
            row = query // count
            for head, spans in enumerate(heads):
                spent = sum([self.costs[row][span] for span in spans])
                self.requested += spent + len(spans)
                most = self.resident[row] + spent
                self.attended[row][head] = max(self.attended[row][head], most)

    def entries(self) -> Tensor:
        """The most that a step has attended so far; before any, what all of them attend."""
        return torch.tensor(self.attended)

    def nbytes(self) -> dict[str, int]:
        own = [getattr(self, name) for name in self._per_row]
        own += [self.zoomed, self.asked]
        tiers = {"device": 0, "host": 0, "disk": 0}
        if self.store is not None:
            tiers |= self.store.nbytes
            tiers["device"] += self.routing.nbytes
        tiers["device"] += storage_bytes(*own) + self.exact.nbytes
        return tiers

    @property
    def _per_row(self) -> Sequence[str]:
        return HELD if self.store is None else HELD + ROUTED

    def crop(self, tokens: int) -> None:
        self.exact.crop(tokens)

    def select_rows(self, rows: Tensor) -> None:
        """Rows that descend from one prompt share its factors, on the host and on the device."""
        for name in self._per_row:
            setattr(self, name, getattr(self, name).index_select(0, rows))
        order = rows.tolist()
        self.room = [self.room[row] for row in order]
        self.first = [self.first[row] for row in order]
        self.costs = [self.costs[row] for row in order]
        self.resident = [self.resident[row] for row in order]
        self.attended = [list(self.attended[row]) for row in order]
        self.exact.select_rows(rows)
        if self.store is not None:
            self.routing.select_rows(rows)

    def details(self) -> dict[str, Any]:
        """`zoom_in`: share of the spans that each query head made its KV head expand, over all
        queries so far. `spans`: of each row."""
        asked = max(int(self.asked), 1)
        return {
            "zoom_in": (self.zoomed / asked).tolist(),
            "spans": [len(costs) for costs in self.costs],
        }

    def traffic(self) -> dict[str, int]:
        """Hits and misses in tokens of expanded spans."""
        if self.store is None:
            return super().traffic()
        missed = self.store.missed_tokens
        return {
            "bytes_moved": self.store.bytes_moved,
            "hits": max(self.requested - missed, 0),
            "misses": missed,
        }


def _mask(chosen: Tensor, spans: int) -> Tensor:
    """bool[B, H, S], where the lists int64[B, H, E] of some of S spans have them; -1 is none."""
    mask = chosen.new_zeros(*chosen.shape[:2], spans + 1, dtype=torch.bool)
    return mask.scatter_(2, chosen % (spans + 1), True)[..., :-1]


def _without_padding(chosen: Tensor) -> Lists:
    """On the host, which moves what is chosen."""
    return [[[s for s in spans if s >= 0] for spans in heads] for heads in chosen.tolist()]


def _joined(blocks: Sequence[list[State]], batch: int) -> State:
    """States of queries that are rows, block by block, as one of [B, H_q, Q, D]."""
    states = zip(*(merge_states(block) for block in blocks), strict=True)
    out, lse = (torch.cat([x.unflatten(0, (batch, -1)) for x in part], 1) for part in states)
    return out.squeeze(3).transpose(1, 2), lse.squeeze(3).transpose(1, 2)
