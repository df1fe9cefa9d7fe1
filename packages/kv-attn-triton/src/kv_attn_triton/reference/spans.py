"""Attention over spans held as low-rank factors, in plain torch, without rebuilding a row.

A few spans of all heads at a time are fetched and multiplied while they are in the cache, the
longest first: padded to the longest of these few, they waste little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import State, pack, unpack, weigh
from .selected import gather

FETCHED = 1 << 19  # elements of one factor per thread that are fetched at a time


@dataclass(frozen=True)
class Few:
    """Spans int64[B, H, E] that are multiplied together, each padded to `width` entries."""

    spans: Tensor
    token: Tensor  # int64[B, H, E * width], a span's last entry repeated past its end
    absent: Tensor  # bool[B, H, E * width], the repeats
    void: Tensor | None  # bool[B, H, 1, 1], heads without an entry at all; None if there is none
    width: int


def span_attention(
    q: Tensor,
    k_left: Tensor,
    k_right: Tensor,
    v_left: Tensor,
    v_right: Tensor,
    offsets: Tensor,
    spans: Tensor,
    longest: int,
    scale: float,
) -> State:
    """See `kv_attn_triton.span_attention`."""
    batch, heads, n, rank = k_left.shape
    count, size = k_right.shape[2], max(q.shape[3], v_right.shape[4])
    rows = pack(q, heads).float() * scale
    few: list[Few] = []
    if n and count and spans.numel():
        each = batch * heads * max(rank, v_left.shape[3])
        few = _divide(offsets.expand(batch, -1), spans, longest, each, size)
    if not few:
        out = q.new_zeros(*rows.shape[:3], v_right.shape[4])
        lse = q.new_full(rows.shape[:3], -torch.inf, dtype=torch.float32)
        return unpack((out, lse), q.shape[1], q.shape[2])
    scores = torch.cat([_scores(rows, k_left, k_right, some) for some in few], -1)

    def values(p: Tensor) -> Tensor:
        parts = p.split([some.token.shape[2] for some in few], -1)
        summed = _values(parts[0], v_left, v_right, few[0])
        for part, some in zip(parts[1:], few[1:], strict=True):
            summed += _values(part, v_left, v_right, some)
        return summed

    out, lse = weigh(scores, values)
    return unpack((out.to(q.dtype), lse), q.shape[1], q.shape[2])


def _scores(rows: Tensor, left: Tensor, right: Tensor, some: Few) -> Tensor:
    """Scaled packed rows float32[B, H, R, D] times keys: float32[B, H, R, E * width]."""
    batch, heads, count, size = rows.shape
    rank = left.shape[3]
    base = gather(right.flatten(3), some.spans).float().view(batch, heads, -1, size)
    turned = (base @ rows.mT).view(-1, rank, count)
    inner = gather(left, some.token).float().view(-1, some.width, rank)
    scores = (turned.mT @ inner.mT).view(batch, heads, -1, count, some.width)
    scores = scores.transpose(2, 3).reshape(batch, heads, count, -1)
    return scores.masked_fill_(some.absent.unsqueeze(2), -torch.inf)


def _values(p: Tensor, left: Tensor, right: Tensor, some: Few) -> Tensor:
    """Probabilities float32[B, H, R, E * width] times values: float32[B, H, R, Dv]."""
    batch, heads, count, _ = p.shape
    rank, size = left.shape[3], right.shape[4]
    inner = gather(left, some.token).view(batch, heads, -1, some.width * rank)
    base = gather(right.flatten(3), some.spans)
    if some.void is not None:  # what they fetch may be NaN
        inner.masked_fill_(some.void, 0.0)
        base.masked_fill_(some.void, 0.0)
    by_span = p.view(batch, heads, count, -1, some.width).transpose(2, 3)
    summed = by_span.reshape(-1, count, some.width) @ inner.float().view(-1, some.width, rank)
    summed = summed.view(batch, heads, -1, count, rank).transpose(2, 3)
    return summed.reshape(batch, heads, count, -1) @ base.float().view(batch, heads, -1, size)


def _divide(bounds: Tensor, spans: Tensor, longest: int, each: int, size: int) -> list[Few]:
    """Spans with entries, longest first, as many at a time as make `FETCHED` elements per thread.

    bounds int64[B, S + 1]; each: elements per entry of all heads; size: as many entries are as
    large as a right factor.
    """
    bounds = bounds.unsqueeze(1).expand(-1, spans.shape[1], -1)
    start = bounds.gather(2, spans.clamp_min(0))
    lengths = (bounds.gather(2, spans.clamp_min(0) + 1) - start).masked_fill_(spans < 0, 0)
    lengths, order = lengths.sort(-1, descending=True)
    # in a head with fewer spans its longest one stands in, of which no entry counts: what lies in
    # spans that are not attended may be NaN
    order = torch.where(lengths > 0, order, order[..., :1])
    nothing = lengths[..., :1] == 0
    start, spans = start.gather(2, order).masked_fill_(nothing, 0), spans.gather(2, order)
    void: Tensor | None = nothing.unsqueeze(-1)
    most = [longest] * spans.shape[2]
    if spans.device.type == "cpu":  # elsewhere reading the lengths would wait for the device
        most = lengths.amax((0, 1)).tolist()
        void = void if bool(nothing.any()) else None
    position = torch.arange(most[0], device=spans.device)
    few, i = [], 0
    while i < len(most) and most[i]:
        width = most[i]
        step = max(1, torch.get_num_threads() * FETCHED // (each * max(width, size)))
        part = slice(i, min(i + step, len(most)))
        here = lengths[:, :, part].unsqueeze(-1)
        absent = position[:width] >= here
        token = start[:, :, part].unsqueeze(-1) + position[:width].minimum((here - 1).clamp_min_(0))
        few.append(Few(spans[:, :, part], token.flatten(2), absent.flatten(2), void, width))
        i = part.stop
    return few
