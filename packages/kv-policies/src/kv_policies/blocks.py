"""SABlock's search for the block size of each segment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kv_policies import _check, _offsets
from kv_policies._select import indices_of, top_mask

# Segments up to this length are padded to one width: fewer, larger steps.
_NARROWEST = 32


def adaptive_blocks(
    scores: Float[Tensor, "B H N"],
    offsets: Int64[Tensor, "*rows S1"],
    budget: int,
    *,
    max_block: int = 16,
    delta: float = 0.9,
    check: bool = True,
) -> Int64[Tensor, "B H K"]:
    """Each segment keeps as many tokens as the top-budget gives it, in blocks as long as can be.

    `n_k = |top-budget tokens in segment k|`. For b = min(max_block, n_k) .. 1: cut the segment
    into blocks of b positions, take blocks by falling mean score until n_k tokens, the last one
    cut to its best tokens; accept the first b with
    `sum of kept scores >= delta * sum of the segment's best n_k scores`. b = 1 always fits.

    Args:
        scores: [B, H, N], at least 0, or -inf for tokens that are never kept; those count neither
            in their block's mean nor in its length.
        offsets: int64[S + 1], or int64[B, S + 1] where rows differ (repeats of N at the end).
        budget: entries per row and head, at least 0.
        max_block: longest block tried, at least 1; 1 is token-level selection.
        delta: share of the token-level score that must be kept, in [0, 1]; 1 is token-level
            selection.
        check: also check values.

    Returns:
        int64[B, H, K], `K = min(budget, N)`, ascending, -1 padded where fewer tokens are allowed.
        Of equal scores the earlier token or block is taken.

    Raises:
        TypeError: wrong dtype.
        ValueError: shapes or devices that do not fit, negative budget, `max_block < 1`, `delta`
            outside [0, 1], scores that are negative, NaN or +inf, offsets out of order.

    Source: SABlock, section III-C, Eqs. 10 to 13, Algorithm 2. Means are compared in float32,
    sums in float64.
    """
    keys = _check.scores("scores", scores, check=check)
    budget = _check.integer("budget", budget, least=0)
    max_block = _check.integer("max_block", max_block, least=1)
    delta = _check.real("delta", delta, 0.0, 1.0)
    table = _offsets.rows(offsets, keys, "scores", keys.shape[-1], check=check)
    if check:
        _check.refuse("scores", scores, (keys < 0) & (keys > -math.inf), "at least 0 or -inf")

    mask = top_mask(keys, budget)
    if delta < 1:  # at 1 only token-level selection loses nothing
        flat = mask.view(-1)
        for segments in _by_width(keys, mask, table, max_block):
            _search(segments, max_block, delta, flat)
    return indices_of(mask, min(budget, keys.shape[-1]))


class _Segments(NamedTuple):
    """P segments of similar length, those with the largest quota first, padded to W positions."""

    quota: Tensor  # [P] tokens to keep
    best: Tensor  # [P] float64, score of the best quota tokens
    score: Tensor  # [P, W] 0 where not allowed
    allowed: Tensor  # [P, W]
    position: Tensor  # [P, W] in the flat [B * H * N]


def _by_width(keys: Tensor, mask: Tensor, table: Tensor, max_block: int) -> Iterator[_Segments]:
    """Segments that keep at least two tokens but not all: for the others any block size agrees."""
    b, h, n = keys.shape
    at = table[:, None].expand(b, h, -1)

    def per_segment(x: Tensor) -> Tensor:
        counted = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
        return counted.gather(-1, at).diff(dim=-1).reshape(-1)

    allowed = keys > -math.inf
    quota, available = per_segment(mask), per_segment(allowed)
    length = at.diff(dim=-1).reshape(-1)
    row_start = torch.arange(b * h, device=keys.device).mul(n).view(b, h, 1)
    first = (at[..., :-1] + row_start).reshape(-1)
    open_ = (quota >= 2) & (quota < available)
    width = 2 ** (length - 1).clamp(min=_NARROWEST - 1).double().log2().floor().long().add(1)
    score = torch.where(allowed, keys, 0.0).view(-1)
    for w in width[open_].unique().tolist():
        chosen = (open_ & (width == w)).nonzero()[:, 0]
        chosen = chosen[quota[chosen].argsort(descending=True, stable=True)]
        inner = torch.arange(w + min(max_block, w), device=keys.device)
        inside = inner < length[chosen, None]
        position = torch.where(inside, first[chosen, None] + inner, 0)
        scores = score[position] * inside
        best = (scores * mask.view(-1)[position]).sum(-1, dtype=torch.float64)
        inside &= allowed.view(-1)[position]
        yield _Segments(quota[chosen], best, scores, inside, position)


def _search(segments: _Segments, max_block: int, delta: float, flat: Tensor) -> None:
    """Try block sizes from the longest down; write what is accepted to the mask `flat`."""
    for size in range(min(max_block, int(segments.quota[0])), 1, -1):
        n = int((segments.quota >= size).sum())
        trial = _Segments(*(t[:n] for t in segments))
        blocks = _take_blocks(trial, size)
        accepted = blocks.kept_score >= delta * trial.best
        kept = _kept_tokens(_Blocks(*(t[accepted] for t in blocks)), size)
        allowed = trial.allowed[accepted, : kept.shape[1]]
        flat[trial.position[accepted, : kept.shape[1]][allowed]] = kept[allowed]
        left = torch.ones_like(segments.quota, dtype=torch.bool)
        left[:n] = ~accepted
        segments = _Segments(*(t[left] for t in segments))
        if len(segments.quota) == 0:
            return


class _Blocks(NamedTuple):
    """What P segments keep at one block size, M blocks each."""

    whole: Tensor  # [P, M] blocks that are kept as they are
    cut: Tensor  # [P, b] positions of the cut block's tokens, the best first
    rest: Tensor  # [P, 1] how many of these are kept
    kept_score: Tensor  # [P] float64


def _take_blocks(segments: _Segments, size: int) -> _Blocks:
    """Blocks of `size` by falling mean until the quota, the last one by its best tokens."""
    quota = segments.quota[:, None]
    blocks = -(-(segments.score.shape[1] - size + 1) // size)
    end = blocks * size
    score = segments.score[:, :end].unflatten(1, (blocks, size)).sum(-1, dtype=torch.float64)
    count = segments.allowed[:, :end].unflatten(1, (blocks, size)).sum(-1)
    mean = (score / count.clamp(min=1)).float().masked_fill(count == 0, -1.0)

    order = mean.sort(dim=-1, descending=True, stable=True).indices
    filled = count.gather(1, order).cumsum(1)
    fits = filled <= quota
    whole = torch.zeros_like(fits).scatter_(1, order, fits)
    # The quota is less than the segment holds, so some block always does not fit.
    next_ = fits.sum(1, keepdim=True)
    rest = quota - torch.nn.functional.pad(filled, (1, 0)).gather(1, next_)
    cut = order.gather(1, next_) * size + torch.arange(size, device=order.device)
    inside = segments.score.gather(1, cut).masked_fill(~segments.allowed.gather(1, cut), -1.0)
    ranked = inside.sort(dim=1, descending=True, stable=True)
    of_cut = ranked.values.double() * (torch.arange(size, device=order.device) < rest)
    kept_score = (score * whole).sum(1) + of_cut.sum(1)
    return _Blocks(whole, cut.gather(1, ranked.indices), rest, kept_score)


def _kept_tokens(blocks: _Blocks, size: int) -> Tensor:
    """bool[P, M * size]."""
    kept = blocks.whole.repeat_interleave(size, dim=1)
    return kept.scatter_(1, blocks.cut, torch.arange(size, device=kept.device) < blocks.rest)
