"""Exact attention of single rows: what the teacher predicts, and which spans its heads look at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kv_integration.router_training.forward import Call, Recording
from kv_integration.router_training.spans import TextSpans


class ExactRows:
    """Exact attention of rows over a recording; with `text`, also the mass on its spans.

    masses: float32[H_q, N, S] by number of the layer with full attention.
    """

    def __init__(self, recording: Recording, rows: Tensor, text: TextSpans | None = None) -> None:
        self.recording, self.rows, self.text = recording, rows, text
        self.masses: dict[int, Tensor] = {}

    def __call__(self, call: Call) -> Tensor:
        """[1, H_q, N, D]."""
        logits, own = row_logits(call, self.recording, self.rows)
        logits = torch.cat((logits, own), -1)
        weights = logits.softmax(-1)  # [H_kv, G, N, T + 1]
        number = self.recording.numbers.get(call.layer)
        if self.text is not None and number is not None:
            self.masses[number] = self.text.sums(weights[..., :-1].flatten(0, 1))
        values = self.recording.values[call.layer].float()
        out = weights[..., :-1].flatten(1, 2) @ values
        out = out.unflatten(1, weights.shape[1:3]) + weights[..., -1:] * own_values(call)
        return out.flatten(0, 1)[None]


def row_logits(call: Call, recording: Recording, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled scores of each row: of recorded keys [H_kv, G, N, T], and of its own [H_kv, G, N, 1].

    -inf for recorded tokens from the row on, and for those outside a sliding window.
    """
    keys = recording.keys[call.layer].float()
    query = grouped(call)
    logits = (query.flatten(1, 2) @ keys.mT).unflatten(1, query.shape[1:3])
    distance = rows[:, None] - torch.arange(keys.shape[1], device=keys.device)
    hidden = distance <= 0
    if call.sliding is not None:
        hidden = hidden | (distance >= call.sliding)
    own = (query * call.key[0].float()[:, None]).sum(-1, keepdim=True)
    return logits.masked_fill(hidden, -math.inf), own


def grouped(call: Call) -> Tensor:
    """Scaled queries by KV head, float32[H_kv, G, N, D]."""
    return call.query[0].float().unflatten(0, (call.key.shape[1], -1)) * call.scale


def own_values(call: Call) -> Tensor:
    """The rows' own values, float32[H_kv, 1, N, D]."""
    return call.value[0].float()[:, None]


def coverage_target(mass: Tensor, compressed: Tensor, coverage: float) -> Tensor:
    """bool[.., N, S]: the smallest set of compressed spans with `coverage` of their mass, Eq. 12.

    mass: float32[.., N, S], the teacher's attention; compressed: bool[N, S]. Spans are taken in
    falling order of mass until what is taken reaches rho times the mass of all compressed spans.
    The target knows the teacher alone. A row without any mass has no target span.
    """
    mass = mass.masked_fill(~compressed, 0.0)
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    taken = (before < coverage * mass.sum(-1, keepdim=True)) & (ordered > 0)
    return torch.zeros_like(taken).scatter_(-1, order, taken)


def mine(masses: Tensor, compressed: Tensor, count: int) -> Tensor:
    """int64[at most count], the rows whose attention concentrates most on one compressed span.

    masses: float32[L, H_q, N, S]. A row's strength is the largest mass that any head puts on one
    span. The text's first span is left out where there are others: it holds attention sinks, which
    every row attends.
    """
    far = masses.masked_fill(~compressed, 0.0)
    if far.shape[-1] > 1:
        far = far[..., 1:]
    strength = far.amax((0, 1, 3))
    return strength.topk(min(count, len(strength))).indices.sort().values
