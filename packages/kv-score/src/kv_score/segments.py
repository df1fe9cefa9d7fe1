"""Statistics of ragged segments: means of vectors, importance, entropy, guided token scores."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from kv_score._checks import (
    check_device,
    check_number,
    check_offsets,
    check_scores,
    check_shape,
    check_tensor,
)

_CHUNK = 8192  # tokens turned to float32 at a time


@torch.no_grad()
def segment_mean(
    x: Float[Tensor, "b h t d"],
    offsets: Int64[Tensor, "*rows segments"],
    weights: Float[Tensor, "b #h t"] | None = None,
) -> Float[Tensor, "b h segments-1 d"]:
    """Mean vector of each segment: m_k = sum_{j in k} w_j x_j / sum_{j in k} w_j.

    Shapes: `x` [B, H, T, D]; `offsets` int64[S+1] from 0 to T, shared by the rows, or [B, S+1]
    inside [0, T] for ragged rows (tokens before the first and after the last offset belong to no
    segment and are never read; short rows repeat their last offset). `weights` [B, H, T] or
    [B, 1, T], not negative; a token of weight 0 is not read. Result [B, H, S, D] in the dtype of
    `x`, summed in float32. Empty segments and segments without weight give zeros.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, unsorted offsets, negative
    or non-finite weights. Source: SentenceKV Eq. 1; SeKV Eqs. 2 and 3 (surprisal weights).
    """
    check_tensor("x", x, ndim=4)
    batch, heads, tokens, size = x.shape
    check_offsets("offsets", offsets, batch, tokens, x.device)
    if weights is not None:
        check_tensor("weights", weights, ndim=3)
        check_shape("weights", weights, (batch, heads, tokens), broadcast=1)
        check_device("weights", weights, x.device)
        wrong = ~(weights.isfinite() & (weights >= 0))
        if bool(wrong.any()):
            raise ValueError(
                f"weights must be finite and not negative, got {float(weights[wrong][0]):g}"
            )
    count = offsets.shape[-1] - 1
    slots = _slots(offsets, batch, heads, tokens)
    sums = torch.zeros(batch * heads * (count + 1), size, device=x.device)
    for start in range(0, tokens, _CHUNK):
        part = x[:, :, start : start + _CHUNK].float()
        if weights is not None:
            share = weights[:, :, start : start + _CHUNK, None].float()
            part = (part * share).masked_fill_(share == 0, 0.0)
        index = slots[:, :, start : start + _CHUNK].flatten()
        sums.index_add_(0, index, part.reshape(-1, size))
    ones = torch.ones(batch, heads, tokens, device=x.device)
    total = _sum(ones if weights is None else weights.float().expand_as(ones), slots, count)
    sums = sums.view(batch, heads, count + 1, size)[:, :, :count]
    total = total[..., None]
    return torch.where(total > 0, sums / total.clamp_min(_TINY), 0.0).to(x.dtype)


@torch.no_grad()
def segment_statistics(
    scores: Float32[Tensor, "b h t"], offsets: Int64[Tensor, "*rows segments"]
) -> tuple[Float32[Tensor, "b h segments-1"], Float32[Tensor, "b h segments-1"]]:
    """Mean score of each segment, and how evenly the score is spread inside it.

    mean_k = sum_{j in k} s_j / |k|;  entropy_k = -sum_j p_j log p_j / log |k| with
    p_j = s_j / sum_{i in k} s_i, hence within [0, 1] (1: evenly spread).

    Shapes: `scores` float32[B, H, T], not negative, -inf where forbidden; `offsets` int64[S+1] or
    [B, S+1] as in `segment_mean`; both results float32[B, H, S]. Forbidden tokens are not counted
    in |k|. A segment without allowed tokens has mean -inf (forbidden itself) and entropy 0;
    a segment of one token, or whose scores are all 0, has entropy 0.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, unsorted offsets, NaN or
    negative scores. Source: SABlock Eqs. 5 and 6, whose text is lost: the form is ours.
    """
    slots = _checked_slots(scores, offsets)
    return _statistics(scores, slots, offsets.shape[-1] - 1)


@torch.no_grad()
def segment_guided(
    scores: Float32[Tensor, "b h t"],
    offsets: Int64[Tensor, "*rows segments"],
    *,
    beta: float,
    lam: float,
) -> Float32[Tensor, "b h t"]:
    """Token scores scaled by their segment's weight: s'_j = s_j * (I_k + beta * D_k) ** lam.

    I_k is the segment's mean score over the largest such mean (of this row and head), D_k its
    normalised entropy (`segment_statistics`). The order inside a segment does not change;
    lam = 0 changes nothing. Shapes and errors as in `segment_statistics`; `beta` and `lam` are
    finite and not negative, and (1 + beta) ** lam fits float32. Scores that would leave float32
    become its largest number. Forbidden tokens stay -inf; tokens of no segment keep their score.

    Source: SABlock Eqs. 7 and 8, whose text is lost: the form is ours.
    """
    check_number("beta", beta, low=0.0)
    check_number("lam", lam, low=0.0)
    if lam * math.log1p(beta) >= math.log(_LARGEST):
        raise ValueError(
            "beta and lam must keep the largest weight (1 + beta) ** lam within float32, "
            f"got {beta:g} and {lam:g}"
        )
    slots = _checked_slots(scores, offsets)
    count = offsets.shape[-1] - 1
    if count == 0:
        return scores.clone()
    mean, entropy = _statistics(scores, slots, count)
    mean = mean.clamp_min(0.0)  # nothing allowed: -inf
    importance = mean / mean.amax(-1, keepdim=True).clamp_min(_TINY)
    weight = (importance + beta * entropy) ** lam
    outside = torch.ones_like(weight[..., :1])
    weight = torch.cat((weight, outside), -1).flatten()[slots]
    return torch.where(scores == -math.inf, scores, (scores * weight).clamp_max_(_LARGEST))


_TINY = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max


def _checked_slots(scores: Tensor, offsets: Tensor) -> Tensor:
    check_scores("scores", scores)
    batch, heads, tokens = scores.shape
    check_offsets("offsets", offsets, batch, tokens, scores.device)
    if bool(((scores < 0) & (scores > -math.inf)).any()):
        raise ValueError(
            "scores must not be negative where an entropy is wanted, "
            f"got {float(scores[scores > -math.inf].min()):g}"
        )
    return _slots(offsets, batch, heads, tokens)


def _slots(offsets: Tensor, batch: int, heads: int, tokens: int) -> Tensor:
    """Position of each token's segment in a flat [B, H, S + 1] array; slot S is no segment."""
    count = offsets.shape[-1] - 1
    offsets = offsets.expand(batch, -1).contiguous()
    token = torch.arange(tokens, device=offsets.device).expand(batch, -1).contiguous()
    segment = torch.searchsorted(offsets[:, 1:].contiguous(), token, right=True)
    segment = segment.masked_fill(token < offsets[:, :1], count)
    rows = torch.arange(batch * heads, device=offsets.device).view(batch, heads, 1)
    return rows * (count + 1) + segment[:, None]


def _sum(values: Tensor, slots: Tensor, count: int) -> Tensor:
    """Sum of values [B, H, T] over each segment: [B, H, S]."""
    batch, heads, _ = values.shape
    sums = values.new_zeros(batch * heads * (count + 1))
    sums.index_add_(0, slots.flatten(), values.flatten())
    return sums.view(batch, heads, count + 1)[..., :count]


def _statistics(scores: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    allowed = scores > -math.inf
    value = scores.double().masked_fill_(~allowed, 0.0)
    total = _sum(value, slots, count)
    size = _sum(allowed.double(), slots, count)
    mean = torch.where(size > 0, total / size.clamp_min(1.0), -math.inf)

    spread = torch.cat((total, torch.ones_like(total[..., :1])), -1).flatten()[slots]
    part = value / torch.where(spread > 0, spread, 1.0)
    bits = _sum(-torch.xlogy(part, part), slots, count)
    entropy = bits / size.clamp_min(2.0).log()
    return mean.float(), entropy.float()
