"""SeKV's objective, Eqs. 10 to 15.

The paper sums over layers, heads and spans. Here each term is the mean of what is summed, and the
reconstruction error is taken relative to the span's energy: the weights then mean the same for any
model, length and scale of the keys, and distillation is not drowned by thousands of spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kv_integration.router_training.settings import Training
from kv_integration.router_training.student import Routed


class Losses(NamedTuple):
    """The four terms of Eq. 10 without their weights, and two shares to watch, all scalars.

    expanded: share of a row's compressed spans that a query head zooms into. rank: mean of the
    effective rank r_S over keys and values.
    """

    distill: Tensor
    zoom: Tensor
    recon: Tensor
    budget: Tensor
    expanded: Tensor
    rank: Tensor

    def total(self, settings: Training, cost_weight: float) -> Tensor:
        """Eq. 10, with lambda 3 as it stands."""
        return (
            self.distill
            + settings.zoom_weight * self.zoom
            + settings.recon_weight * self.recon
            + cost_weight * self.budget
        )


def distillation(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean over rows of KL(p_full || p_SeKV), from logits [N, V]: Eq. 11."""
    full, ours = teacher.log_softmax(-1), student.log_softmax(-1)
    return nn.functional.kl_div(ours, full, log_target=True, reduction="batchmean")


def zoom_loss(logits: Tensor, target: Tensor, used: Tensor, positive_weight: float) -> Tensor:
    """Mean over `used` entries of the positive-weighted cross-entropy: Eq. 13.

    logits: before the sigmoid. target, used: bool of the same shape. No used entry gives 0.
    """
    loss = nn.functional.binary_cross_entropy_with_logits(
        logits,
        target.to(logits.dtype),
        pos_weight=logits.new_tensor(positive_weight),
        reduction="none",
    )
    return torch.where(used, loss, 0.0).sum() / used.sum().clamp_min(1)


def reconstruction_error(gates: Tensor, sigma: Tensor) -> Tensor:
    """E(m, sigma) = sum_i (1 - m_i)^2 sigma_i^2 over the last dimension: Eq. 14.

    The squared Frobenius distance of a span's gated factors to its factors with all gates at 1.
    """
    return ((1 - gates).square() * sigma.square()).sum(-1)


def effective_rank(gates: Tensor, sigma: Tensor) -> Tensor:
    """r_S = sum_i m_i over the components that exist (sigma > 0)."""
    return torch.where(sigma > 0, gates, 0.0).sum(-1)


def objective(
    teacher: Tensor,
    student: Tensor,
    routed: Mapping[int, Routed],
    target: Tensor,
    used: Tensor,
    compressed: Tensor,
    settings: Training,
) -> Losses:
    """All terms for one window of text.

    teacher, student: logits [N, V]. target, used: bool[L, H_q, N, S]; used says which heads, rows
    and spans the zoom loss supervises. compressed: bool[N, S]. The rank's cost counts keys and
    values, as Eq. 14 does; Eq. 15 writes the keys' alone, which would leave values no reason to
    give up a component.
    """
    layers = [routed[number] for number in sorted(routed)]
    zoom = torch.stack([layer.zoom for layer in layers])
    pairs = [pair for layer in layers for pair in zip(layer.gates, layer.sigma, strict=True)]
    energy = [sigma.square().sum(-1).clamp_min(1e-12) for _, sigma in pairs]
    errors = [reconstruction_error(*pair) / e for pair, e in zip(pairs, energy, strict=True)]
    ranks = torch.stack([effective_rank(*pair).mean() for pair in pairs]).mean()
    present = compressed.expand_as(zoom)
    expanded = torch.where(present, zoom, 0.0).sum() / present.sum().clamp_min(1)
    return Losses(
        distill=distillation(teacher, student),
        zoom=zoom_loss(
            torch.stack([layer.logits for layer in layers]),
            target,
            used,
            settings.positive_weight,
        ),
        recon=torch.stack([error.mean() for error in errors]).mean(),
        budget=expanded + settings.rank_cost * ranks,
        expanded=expanded.detach(),
        rank=ranks.detach(),
    )
