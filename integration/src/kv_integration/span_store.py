"""Low-rank factors of spans: compact on the host or disk, those in use on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kv_attn_triton import span_attention
from kv_integration.storable import storable
from kv_lowrank import PackedSpans
from kv_offload import RecordStore, storage_bytes

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
        device, dtype = self.records.device, self.records.dtype
        self.rank = [max(1, int(ranks.max())) for ranks in self.ranks]
        self.slot_of = torch.full((len(self.records),), -1, dtype=torch.int32, device=device)
        self.resident: list[int] = []
        self.ends: list[int] = []
        self.offsets = torch.zeros(1, dtype=torch.int64, device=device)
        self.factors = Factors(
            *(
                torch.empty(0, *shape, dtype=dtype, device=device)
                for rank, width in zip(self.rank, self.widths, strict=True)
                for shape in ((rank,), (rank, width))
            )
        )

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

    def fetch(self, spans: Tensor) -> Tensor:
        """Slots int64 of `spans` (numbers of spans, -1 for none) among the factors on the device.

        Where all are there already nothing moves; otherwise the others come, and those that are
        not in `spans` go.
        """
        slots = self._slots(spans)
        if bool((slots < 0).ne(spans < 0).any()):
            self._exchange(spans[spans >= 0].unique().tolist())
            slots = self._slots(spans)
        return slots

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
        tiers["device"] += storage_bytes(self.slot_of, self.offsets, *self.factors)
        return tiers

    def _slots(self, spans: Tensor) -> Tensor:
        held = self.slot_of[spans.clamp(min=0)].long()
        return held.masked_fill_(spans < 0, -1)

    def _exchange(self, wanted: list[int]) -> None:
        """Make `wanted` what is resident: those that were stay, the others are read."""
        at = {span: slot for slot, span in enumerate(self.resident)}
        kept = [at[span] for span in wanted if span in at]
        missing = [span for span in wanted if span not in at]
        come, lengths = self._read(missing)
        starts = [0, *self.ends]
        rows = [slice(starts[slot], self.ends[slot]) for slot in kept]
        held = [
            torch.cat([*(old[part] for part in parts), new])
            for old, new, parts in zip(
                self.factors,
                come,
                (rows, [slice(slot, slot + 1) for slot in kept]) * 2,
                strict=True,
            )
        ]
        sizes = [self.ends[slot] - starts[slot] for slot in kept] + lengths
        device = self.slot_of.device
        self.factors = Factors(*held)
        self.resident = [self.resident[slot] for slot in kept] + missing
        self.ends = list(accumulate(sizes))
        self.offsets = torch.tensor([0, *self.ends], device=device)
        self.slot_of.fill_(-1)
        self.slot_of[torch.tensor(self.resident, device=device)] = torch.arange(
            len(self.resident), dtype=torch.int32, device=device
        )
        self.missed_tokens += sum(lengths)

    def _read(self, spans: list[int]) -> tuple[Factors, list[int]]:
        """Factors of `spans` on the device, and their lengths in tokens."""
        index = torch.tensor(spans, dtype=torch.int64)
        lengths = self.lengths[index].tolist()
        ranks = [ranks[index].tolist() for ranks in self.ranks]
        device = self.slot_of.device
        pinned = device.type == "cuda"
        staged = [
            torch.zeros(*shape, dtype=self.records.dtype, pin_memory=pinned)
            for rank, width in zip(self.rank, self.widths, strict=True)
            for shape in ((sum(lengths), rank), (len(spans), rank, width))
        ]
        start = 0
        for slot, record in enumerate(self.records.read(spans)):
            stop, at = start + lengths[slot], 0
            for kind, width in enumerate(self.widths):
                left, right = staged[2 * kind : 2 * kind + 2]
                rank = ranks[kind][slot]
                sizes = (rank * lengths[slot], rank, rank * width)
                u, sigma, vh = record[at : at + sum(sizes)].split(sizes)
                at += sum(sizes)
                if rank:
                    left[start:stop, :rank] = u.view(-1, rank)
                    torch.mul(vh.view(rank, width), sigma[:, None], out=right[slot, :rank])
            start = stop
        come = Factors(*(x.to(device, non_blocking=pinned) for x in staged))
        self.bytes_moved += storage_bytes(*staged)
        return come, lengths


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
