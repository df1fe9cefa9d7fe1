"""Low-rank factors of spans: compact on the host or disk, those in use on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, compress
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_attn_triton import span_attention
from kv_integration.storable import storable
from kv_lowrank import PackedSpans
from kv_offload import RecordStore, storage_bytes

Bits = NDArray[np.signedinteger[Any]]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Attributes of `SpanStore` that a file holds.
STORED = ("records", "widths", "lengths", "ranks", "bytes_moved", "missed_tokens")


class Factors(NamedTuple):
    """Spans one after the other, ranks filled up with zeros to R and R_v.

    left: [N, R], rows of U for all tokens; right: [E, R, D], Sigma V^T of each span; of keys and
    of values.
    """

    k_left: Tensor
    k_right: Tensor
    v_left: Tensor
    v_right: Tensor


@storable
class SpanStore:
    """Spans of all rows and KV heads of a layer, numbered row by row, head by head.

    Span i lies on its tier as one record of r (|S| + D + 1) + r_v (|S| + D_v + 1) numbers: U,
    sigma and V^T of its keys, then of its values (SeKV, section 3.2). `fetch` brings those that a
    step wants to the device, where they stay as long as later steps want them.
    """

    def __init__(
        self,
        rows: Sequence[tuple[PackedSpans, PackedSpans]],
        *,
        tier: Literal["host", "disk"],
        device: torch.device,
    ) -> None:
        parts = [part for keys, values in rows for part in _parts(keys, values)]
        sizes = [sum(x.numel() for x in part) for part in parts]
        numbers = torch.cat([x.flatten() for part in parts for x in part])
        self.records = RecordStore(numbers, sizes, tier=tier, device=device)
        self.widths = [packed.right.shape[-1] for packed in rows[0]]
        # Beside each record on the host: its tokens, and its ranks in keys and values.
        self.lengths = _table([keys.lengths for keys, _ in rows])
        self.ranks = [_table([row[i].ranks for row in rows]) for i in (0, 1)]
        self.bytes_moved = self.missed_tokens = 0
        self._clear()

    def _clear(self) -> None:
        """Hold no span on the device."""
        self.rank = [max(1, int(ranks.max())) for ranks in self.ranks]
        self.slots: dict[int, int] = {}  # of the spans on the device, in this order
        self.sizes: list[int] = []  # their tokens
        device = self.records.device
        self.offsets = torch.zeros(1, dtype=torch.int64, device=device)
        self.factors = self._empty(0, 0, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.coming: torch.cuda.Event | None = None

    def stored_fields(self) -> dict[str, Any]:
        """For a file: what is on the device is brought there again when it is wanted."""
        return {name: getattr(self, name) for name in STORED}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SpanStore:
        """As `stored_fields` gave them."""
        store = cls.__new__(cls)
        vars(store).update(fields)
        store.lengths = store.lengths.cpu()
        store.ranks = [ranks.cpu() for ranks in store.ranks]
        store._clear()
        return store

    def fetch(self, wanted: Sequence[Sequence[int]]) -> Tensor:
        """Slots int64[N, E] of N lists of spans among the factors on the device, -1 padded.

        Where all are there already nothing moves; otherwise the others come, and those that are
        not wanted go.
        """
        self._await()
        self.missed_tokens += self._exchange(wanted)
        slots, longest = self.slots, max(map(len, wanted))
        padded = [[slots[i] for i in spans] + [-1] * (longest - len(spans)) for spans in wanted]
        return torch.tensor(padded, device=self.offsets.device)

    def prefetch(self, wanted: Sequence[Sequence[int]]) -> None:
        """Make `wanted`, a guess at what `fetch` will be asked for, what is on the device.

        On CUDA the factors move on a stream of their own while the device computes, and the next
        call waits for them; on the CPU they move at once. They count as moved, but not as missed.
        """
        self._await()
        if self.stream is None:
            self._exchange(wanted)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        for held in (*self.factors, self.offsets):
            held.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            self._exchange(wanted)
            self.coming = self.stream.record_event()

    def _await(self) -> None:
        """Let what is queued from now on wait for what `prefetch` brings."""
        if self.coming is not None:
            stream = torch.cuda.current_stream(self.offsets.device)
            stream.wait_event(self.coming)
            for held in (*self.factors, self.offsets):
                held.record_stream(stream)
            self.coming = None

    def attend(
        self, queries: Tensor, slots: Tensor, *, longest: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention over the spans in `slots` [B, H_kv, E], -1 for none: `(out, lse)`."""
        batch, heads = slots.shape[:2]
        k_left, k_right, v_left, v_right = (x.expand(batch, heads, *x.shape) for x in self.factors)
        return span_attention(
            queries, k_left, k_right, v_left, v_right, self.offsets, slots,
            longest=longest, scale=scale,
        )  # fmt: skip

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by tier of the tensors that exist."""
        tiers = dict(self.records.nbytes)
        tiers["host"] += storage_bytes(self.lengths, *self.ranks)
        tiers["device"] += storage_bytes(self.offsets, *self.factors)
        return tiers

    def _exchange(self, lists: Sequence[Sequence[int]]) -> int:
        """Make the spans in `lists` what is on the device, unless they are there: of those that
        are there the wanted stay, the others are read. Returns how many tokens came."""
        wanted = set().union(*lists)
        if wanted <= self.slots.keys():
            return 0
        stay = np.array([span in wanted for span in self.slots], dtype=np.bool_)
        come = sorted(wanted - self.slots.keys())
        lengths = self.lengths.numpy()[come].tolist()
        device = self.offsets.device
        tokens, spans = np.flatnonzero(np.repeat(stay, self.sizes)), np.flatnonzero(stay)
        fresh = self._empty(len(tokens) + sum(lengths), len(spans) + len(come), device=device)
        added = []
        for old, new, kept in zip(self.factors, fresh, (tokens, spans) * 2, strict=True):
            if len(kept):
                at = torch.from_numpy(kept).to(device)
                torch.index_select(old, 0, at, out=new[: len(kept)])
            added.append(new[len(kept) :])
        self._read(come, lengths, Factors(*added))
        self.factors = fresh
        resident = [*compress(self.slots, stay), *come]
        self.slots = {span: slot for slot, span in enumerate(resident)}
        self.sizes = [*compress(self.sizes, stay), *lengths]
        self.offsets = torch.tensor([0, *accumulate(self.sizes)], device=device)
        return sum(lengths)

    def _read(self, spans: list[int], lengths: list[int], into: Factors) -> None:
        """Write the factors of `spans`, of so many tokens each, to where they belong."""
        pinned = into.k_left.is_cuda
        numbers, ends = _bits(self.records.numbers), self.records.ends
        at = [ends[span - 1] if span else 0 for span in spans]
        for kind, (rank, width) in enumerate(zip(self.rank, self.widths, strict=True)):
            left, right = into[2 * kind : 2 * kind + 2]
            staged = left if not pinned else torch.empty_like(left, device="cpu", pin_memory=True)
            scaled = torch.empty(
                len(spans), rank * (width + 1), dtype=left.dtype, pin_memory=pinned
            )
            ranks = self.ranks[kind].numpy()[spans].tolist()
            at = _unpack(numbers, at, lengths, ranks, staged, scaled, width)
            if pinned:
                left.copy_(staged, non_blocking=True)
            sigma, vh = scaled.to(left.device, non_blocking=pinned).split([rank, rank * width], 1)
            torch.mul(vh.unflatten(1, (rank, width)), sigma.unsqueeze(2), out=right)
            self.bytes_moved += left.nbytes + scaled.nbytes

    def _empty(self, tokens: int, spans: int, **options: Any) -> Factors:
        """Factors of so many tokens and spans, nothing written to them yet."""
        return Factors(
            *(
                torch.empty(*shape, dtype=self.records.dtype, **options)
                for rank, width in zip(self.rank, self.widths, strict=True)
                for shape in ((tokens, rank), (spans, rank, width))
            )
        )


def _unpack(
    numbers: Bits,
    starts: list[int],
    lengths: list[int],
    ranks: list[int],
    left: Tensor,
    right: Tensor,
    width: int,
) -> list[int]:
    """Copy U of a span after the other, from `starts` on, to `left` [N, R], sigma and V^T to
    `right` [E, R + R * D], both filled up with zeros; where each of them ends.

    They have no common shape, so each is copied apart: as bits and by numpy, which begins a copy
    in a fraction of the time that torch takes.
    """
    most = left.shape[1]
    u, others, row, ends = _bits(left).reshape(-1), _bits(right), 0, []
    for to, start, length, rank in zip(others, starts, lengths, ranks, strict=True):
        middle, end = start + length * rank, start + (length + 1 + width) * rank
        rows = u[row * most : (row + length) * most]
        if rank == most:
            rows[:] = numbers[start:middle]
            to[:] = numbers[middle:end]
        else:
            rows = rows.reshape(length, most)
            rows[:, :rank], rows[:, rank:] = numbers[start:middle].reshape(length, rank), 0
            to[:rank], to[rank:most] = numbers[middle : middle + rank], 0
            full = most + rank * width
            to[most:full], to[full:] = numbers[middle + rank : end], 0
        row += length
        ends.append(end)
    return ends


def _bits(x: Tensor) -> Bits:
    """The same memory as integers, which numpy knows for every dtype."""
    return x.view(BITS[x.element_size()]).numpy()


def _parts(*both: PackedSpans) -> list[tuple[Tensor, ...]]:
    """Of each span [B, H, S]: U, sigma and V^T of its keys, then of its values; views."""
    parts = []
    for packed in both:
        ranks, sizes = packed.ranks.flatten(), (packed.ranks * packed.lengths).flatten()
        parts.append(packed.left.split(sizes.tolist()))
        parts += [x.split(ranks.tolist()) for x in (packed.sigma, packed.right)]
    return list(zip(*parts, strict=True))


def _table(parts: Sequence[Tensor]) -> Tensor:
    """int32 on the host, one number per span of all rows."""
    return torch.cat([part.flatten() for part in parts]).to("cpu", torch.int32)
