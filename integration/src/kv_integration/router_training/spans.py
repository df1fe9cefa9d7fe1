"""A text's spans as SeKV cuts them, and what a layer holds of them, as constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kv_integration.spans import Spans
from kv_lowrank import SpanFactors, span_svd
from kv_score import segment_mean

BLOCK = 32  # tokens of a span that are rebuilt at a time


@dataclass(frozen=True)
class TextSpans:
    """The S spans of T tokens, for queries anywhere in the text.

    spans: `tokens` int64[M] are those in spans, `offsets` int64[S + 1] cuts them. stop: int64[S],
    position after each span's last token. span_of: int64[T], -1 for tokens in none. slots:
    int64[N, BLOCK], places in `tokens` in blocks that no two spans share, -1 where a block is not
    full; slot_span: int64[N], the span of each.
    """

    spans: Spans
    stop: Tensor
    span_of: Tensor
    slots: Tensor
    slot_span: Tensor

    @classmethod
    def of(cls, spans: Spans, tokens: int) -> TextSpans:
        """The spans of a text of so many tokens."""
        device = spans.tokens.device
        start, end = spans.offsets[:-1], spans.offsets[1:]
        number = torch.arange(len(start), device=device)
        span_of = torch.full((tokens,), -1, device=device)
        span_of[spans.tokens] = torch.repeat_interleave(number, end - start)
        blocks = (end - start + BLOCK - 1) // BLOCK
        slot_span = torch.repeat_interleave(number, blocks)
        place = torch.arange(len(slot_span), device=device)
        place = (place - (blocks.cumsum(0) - blocks)[slot_span]) * BLOCK
        slots = (start[slot_span] + place)[:, None] + torch.arange(BLOCK, device=device)
        slots = slots.masked_fill(slots >= end[slot_span, None], -1)
        return cls(spans, spans.tokens[end - 1] + 1, span_of, slots, slot_span)

    @property
    def count(self) -> int:
        """S."""
        return len(self.stop)

    @property
    def log_size(self) -> Tensor:
        """float32[S], log |S|."""
        return self.spans.offsets.diff().float().log()

    def compressed(self, rows: Tensor, window: int) -> Tensor:
        """bool[N, S]: spans that have wholly left the last `window` tokens of a row.

        Until its last token is `window` or more before the row, a span's tokens are exact.
        """
        return self.stop <= rows[:, None] - window + 1

    def sums(self, per_token: Tensor) -> Tensor:
        """[.., T] summed over each span: [.., S]."""
        inside = self.span_of >= 0
        out = per_token.new_zeros(*per_token.shape[:-1], self.count)
        return out.index_add_(-1, self.span_of[inside], per_token[..., inside])


class LayerSpans(NamedTuple):
    """A layer's memory of the spans; constants, float32.

    mean_keys, mean_values: [H_kv, S, D], weighted by surprisal. keys, values: factors of a batch of
    one.
    """

    mean_keys: Tensor
    mean_values: Tensor
    keys: SpanFactors
    values: SpanFactors


@torch.no_grad()
def layer_spans(keys: Tensor, values: Tensor, text: TextSpans, max_rank: int) -> LayerSpans:
    """What a layer holds of its keys and values [H_kv, T, D]: Eqs. 3 and 6, without gates."""
    spans = text.spans
    keys, values = (x[None, :, spans.tokens].float() for x in (keys, values))
    weights = spans.weights[None, None]
    return LayerSpans(
        segment_mean(keys, spans.offsets, weights)[0],
        segment_mean(values, spans.offsets, weights)[0],
        span_svd(keys, spans.offsets, max_rank),
        span_svd(values, spans.offsets, max_rank),
    )


def rebuild(factors: SpanFactors, gates: Tensor, text: TextSpans) -> Tensor:
    """Tokens of all spans in slots, [H_kv, N * BLOCK, D], from gated factors: Eq. 8.

    gates: [H_kv, S, R]; gradients reach them. Empty slots hold 0.
    """
    scaled = (gates * factors.sigma[0])[..., None] * factors.right[0]  # [H_kv, S, R, D]
    left = factors.left[0][:, text.slots.clamp_min(0)]  # [H_kv, N, BLOCK, R]
    left = left.masked_fill((text.slots < 0)[..., None], 0.0)
    return (left @ scaled[:, text.slot_span]).flatten(1, 2)
