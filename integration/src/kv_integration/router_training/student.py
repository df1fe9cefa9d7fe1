"""SeKV's mixed-resolution attention at single rows, differentiable in what the router learns."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kv_integration.router import Router
from kv_integration.router_training.forward import Call, Recording
from kv_integration.router_training.spans import LayerSpans, TextSpans, rebuild
from kv_integration.router_training.teacher import ExactRows, grouped, own_values, row_logits

CLAMP = 30.0  # exponent of an entry that is not attended, so that its gradient stays finite


class Routed(NamedTuple):
    """What one layer's router said.

    logits: [H_q, N, S], relevance before its sigmoid. zoom: [H_q, N, S], z of Eq. 9.
    gates, sigma: [H_kv, S, R] of keys, then of values.
    """

    logits: Tensor
    zoom: Tensor
    gates: tuple[Tensor, Tensor]
    sigma: tuple[Tensor, Tensor]


class MixedRows:
    """Attention of rows over anchors, window, expanded tokens and coarse entries.

    routed: `Routed` by number of the layer. Layers with a sliding window attend exactly.
    """

    def __init__(
        self,
        router: Router,
        recording: Recording,
        rows: Tensor,
        text: TextSpans,
        layers: list[LayerSpans],
        window: int,
    ) -> None:
        self.router, self.recording, self.rows = router, recording, rows
        self.text, self.layers = text, layers
        self.compressed = text.compressed(rows, window)
        self.exact = ExactRows(recording, rows)
        self.routed: dict[int, Routed] = {}

    def __call__(self, call: Call) -> Tensor:
        """[1, H_q, N, D]."""
        number = self.recording.numbers.get(call.layer)
        if number is None:
            return self.exact(call)
        routed = self.routed[number] = route(
            self.router, number, call.query[0].float(), self.layers[number], self.text
        )
        query, memory, text = grouped(call), self.layers[number], self.text
        exact, own = row_logits(call, self.recording, self.rows)
        gone = self.compressed[:, text.span_of.clamp_min(0)] & (text.span_of >= 0)
        exact = exact.masked_fill(gone, -math.inf)

        # A KV head expands what any of its query heads asks for; heads that agree share a gradient.
        zoom = routed.zoom.unflatten(0, query.shape[:2])
        share = zoom.amax(1, keepdim=True)  # [H_kv, 1, N, S]
        keys, values = (
            rebuild(factors, gates, text)
            for factors, gates in zip((memory.keys, memory.values), routed.gates, strict=True)
        )
        fine = _scores(query, keys)
        real = (text.slots >= 0).flatten()
        slot_span = text.slot_span.repeat_interleave(text.slots.shape[1])
        fine_share = (share * self.compressed)[..., slot_span] * real
        coarse = _scores(query, memory.mean_keys) + text.log_size
        coarse_share = (1 - share) * self.compressed

        parts = (
            (exact, torch.ones_like(exact), self.recording.values[call.layer].float()),
            (fine, fine_share, values),
            (coarse, coarse_share, memory.mean_values),
        )
        # One softmax: the largest attended score is the reference, and an entry's share (0 or 1
        # going forward) multiplies its exponential, so that a gradient tells what it would add.
        top = own.detach()
        for scores, weight, _ in parts:
            attended = scores.detach().masked_fill(weight <= 0, -math.inf)
            top = torch.maximum(top, attended.amax(-1, keepdim=True))
        total = (own - top).exp()
        out = total * own_values(call)
        for scores, weight, part in parts:
            power = (scores - top).clamp_max(CLAMP).exp() * weight
            total = total + power.sum(-1, keepdim=True)
            out = out + (power.flatten(1, 2) @ part).unflatten(1, power.shape[1:3])
        return (out / total).flatten(0, 1)[None]


def route(
    router: Router, number: int, query: Tensor, memory: LayerSpans, text: TextSpans
) -> Routed:
    """Relevance, zoom decisions and rank gates of a layer; query [H_q, N, D] after RoPE."""
    summaries = router.summaries(number, memory.mean_keys)
    logits = router.logits(number, query, summaries, text.log_size)
    zoom = straight_through(logits.sigmoid(), router.thresholds[number][:, None, None])
    sigma = memory.keys.sigma[0], memory.values.sigma[0]
    gates = (
        router.gates(number, sigma[0], summaries, "key"),
        router.gates(number, sigma[1], summaries, "value"),
    )
    return Routed(logits, zoom, gates, sigma)


def straight_through(relevance: Tensor, threshold: Tensor) -> Tensor:
    """z = 1[relevance > threshold], with the gradient of relevance - threshold: Eq. 9.

    Source: SeKV section 3.3 and Bengio et al., 2013.
    """
    hard = (relevance > threshold).to(relevance.dtype)
    soft = relevance - threshold
    return hard + (soft - soft.detach())


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """[H_kv, G, N, T] of query [H_kv, G, N, D], scaled, and keys [H_kv, T, D]."""
    return (query.flatten(1, 2) @ keys.mT).unflatten(1, query.shape[1:3])
