"""Smoothing of scores along the tokens, so that neighbours of an important token stay too."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float32
from torch import Tensor

from kv_score._checks import check_choice, check_positive, check_scores


@torch.no_grad()
def pool(
    scores: Float32[Tensor, "b h t"],
    mode: Literal["none", "avg", "max"] = "avg",
    *,
    kernel: int = 7,
) -> Float32[Tensor, "b h t"]:
    """Mean or maximum of the scores in a window of `kernel` tokens centred on each token.

    avg: s'_j = mean of s over the allowed tokens within kernel//2 of j; max: their maximum.

    Shapes: `scores` float32[B, H, T], -inf where forbidden; the result has the same shape.
    Forbidden tokens stay -inf and count for nothing in their neighbours' windows; the window is
    cut at both ends, so an edge is not pulled towards zero (SnapKV's own pooling pads with zeros
    that count). `mode="none"` returns the scores as they are. `kernel` is odd.

    Raises ValueError for NaN or +inf scores, an unknown `mode`, an even or too small `kernel`.
    Source: SnapKV, section 4.2.
    """
    check_scores("scores", scores)
    check_choice("mode", mode, ("none", "avg", "max"))
    check_positive("kernel", kernel)
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd so that windows are centred, got {kernel}")
    if mode == "none" or scores.shape[-1] == 0:
        return scores
    forbidden = scores == -math.inf
    half = kernel // 2
    if mode == "max":
        pooled = F.max_pool1d(scores, kernel, stride=1, padding=half)
    else:
        total = F.avg_pool1d(scores.masked_fill(forbidden, 0.0), kernel, stride=1, padding=half)
        share = F.avg_pool1d((~forbidden).float(), kernel, stride=1, padding=half)
        pooled = total / share  # 0 / 0 only where the token itself is forbidden
    return pooled.masked_fill(forbidden, -math.inf)
