"""A text's spans, and what a layer holds of them: SeKV's sections 3.1 and 3.2, as constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kv_lowrank import SpanFactors, span_svd
from kv_score import segment_mean
from kv_segment import by_surprisal

BLOCK = 32  # tokens of a span that are rebuilt at a time


@dataclass(frozen=True)
class TextSpans:
    """Spans of T tokens; S of the segments are spans, the others are runs of anchors.

    offsets: int64[segments + 1]. spans: int64[S], which segments they are. start, stop: int64[S].
    span_of: int64[T], -1 for anchors. weights: float32[T], surprisal (Eq. 2 divides by its sum).
    slots: int64[N, BLOCK], the spans' tokens in blocks that no two spans share, -1 where a block is
    not full; slot_span: int64[N].
    """

    offsets: Tensor
    spans: Tensor
    start: Tensor
    stop: Tensor
    span_of: Tensor
    weights: Tensor
    slots: Tensor
    slot_span: Tensor

    @property
    def count(self) -> int:
        """S."""
        return len(self.spans)

    @property
    def log_size(self) -> Tensor:
        """float32[S], log |S|."""
        return (self.stop - self.start).float().log()

    def compressed(self, rows: Tensor, window: int) -> Tensor:
        """bool[N, S]: spans that have wholly left the last `window` tokens of a row.

        A span is compressed once its last token is `window` or more before the row; until then its
        tokens are exact.
        """
        return self.stop <= rows[:, None] - window + 1

    def sums(self, per_token: Tensor) -> Tensor:
        """[.., T] summed over each span: [.., S]."""
        inside = self.span_of >= 0
        out = per_token.new_zeros(*per_token.shape[:-1], self.count)
        return out.index_add_(-1, self.span_of[inside], per_token[..., inside])


class LayerSpans(NamedTuple):
    """A layer's memory of the spans; all constants, float32.

    mean_keys, mean_values: [H_kv, S, D], weighted by surprisal. keys, values: their factors over
    all segments, rows without a batch being the first of one.
    """

    mean_keys: Tensor
    mean_values: Tensor
    keys: SpanFactors
    values: SpanFactors


def find_spans(
    surprisal: Tensor, *, alpha: float, min_length: int, absorbed: bool = False
) -> TextSpans:
    """Segments of a text by its surprisal, float32[T].

    `absorbed`: anchors belong to the span that follows them (the last ones to the span before), so
    that all tokens are in spans.
    """
    offsets, anchors = by_surprisal(
        surprisal.float().cpu().numpy(), alpha=alpha, min_length=min_length
    )
    is_span = ~anchors[offsets[:-1]]
    if absorbed and is_span.any():
        first_of_run = np.flatnonzero(~is_span & np.append(is_span[1:], False))
        keep = np.union1d([0], offsets[first_of_run])
        offsets = np.append(keep, offsets[-1])
        is_span = np.ones(len(keep), dtype=bool)
    device = surprisal.device
    offsets = torch.from_numpy(offsets).to(device)
    spans = torch.from_numpy(np.flatnonzero(is_span)).to(device)
    start, stop = offsets[spans], offsets[spans + 1]
    span_of = torch.full((len(surprisal),), -1, device=device)
    lengths = stop - start
    member = torch.repeat_interleave(torch.arange(len(spans), device=device), lengths)
    token = torch.arange(int(lengths.sum()), device=device)
    within = token - (lengths.cumsum(0) - lengths)[member]
    span_of[start[member] + within] = member
    blocks = (lengths + BLOCK - 1) // BLOCK
    slot_span = torch.repeat_interleave(torch.arange(len(spans), device=device), blocks)
    first = torch.arange(len(slot_span), device=device) - (blocks.cumsum(0) - blocks)[slot_span]
    slots = start[slot_span, None] + first[:, None] * BLOCK + torch.arange(BLOCK, device=device)
    slots = slots.masked_fill(slots >= stop[slot_span, None], -1)
    # A span without any surprise (the text's first token alone) is averaged evenly.
    weights = surprisal.float().clamp_min(torch.finfo(torch.float32).tiny)
    return TextSpans(offsets, spans, start, stop, span_of, weights, slots, slot_span)


@torch.no_grad()
def layer_spans(keys: Tensor, values: Tensor, text: TextSpans, max_rank: int) -> LayerSpans:
    """What a layer holds of its keys and values [H_kv, T, D]: Eqs. 3 and 6, without gates."""
    weights = text.weights[None, None]
    means, factors = [], []
    for x in (keys[None].float(), values[None].float()):
        means.append(segment_mean(x, text.offsets, weights)[0][:, text.spans])
        factors.append(span_svd(x, text.offsets, max_rank))
    return LayerSpans(*means, *factors)


def rebuild(factors: SpanFactors, gates: Tensor, text: TextSpans) -> Tensor:
    """Tokens of all spans in slots, [H_kv, N * BLOCK, D], from gated factors: Eq. 8.

    gates: [H_kv, S, R]; gradients reach them. Empty slots hold 0.
    """
    sigma, right = factors.sigma[0][:, text.spans], factors.right[0][:, text.spans]
    scaled = (gates * sigma)[..., None] * right  # [H_kv, S, R, D]
    left = factors.left[0][:, text.slots.clamp_min(0)]  # [H_kv, N, BLOCK, R]
    left = left.masked_fill((text.slots < 0)[..., None], 0.0)
    return (left @ scaled[:, text.slot_span]).flatten(1, 2)
