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
_NARROWEST = 64


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
        flat = torch.nn.functional.pad(mask.reshape(-1), (0, 1))  # the last one is for padding
        for segments, position in _by_width(keys, mask, table, max_block, delta):
            found = _search(segments, flat[position], max_block)
            flat.scatter_(0, position.view(-1), (found & (segments.allowed > 0)).view(-1))
        mask = flat[:-1].view(mask.shape)
    return indices_of(mask, min(budget, keys.shape[-1]))


class _Segments(NamedTuple):
    """P segments of similar length, those with the largest quota first, padded to W positions."""

    place: Tensor  # [P] 0 .. P - 1
    quota: Tensor  # [P] tokens to keep
    least: Tensor  # [P] float64, score that blocks must keep
    score: Tensor  # [P, W] float64, 0 where not allowed
    allowed: Tensor  # [P, W] float64, 1 or 0

    def first(self, n: int) -> _Segments:
        return _Segments(*(t[:n] for t in self))

    def at(self, numbers: Tensor) -> _Segments:
        return _Segments(*(t.index_select(0, numbers) for t in self))


def _by_width(
    keys: Tensor, mask: Tensor, table: Tensor, max_block: int, delta: float
) -> Iterator[tuple[_Segments, Tensor]]:
    """Segments that keep at least two tokens but not all: for the others any block size agrees.

    With them come their positions [P, W] in the flat [B * H * N], the end of it for padding.
    """
    b, h, n = keys.shape
    at = table[:, None].expand(b, h, -1)

    def per_segment(x: Tensor) -> Tensor:
        counted = torch.nn.functional.pad(x.cumsum(-1, dtype=torch.int32), (1, 0))
        return counted.gather(-1, at).diff(dim=-1).reshape(-1)

    allowed = keys > -math.inf
    quota, available = per_segment(mask), per_segment(allowed)
    length = at.diff(dim=-1).reshape(-1)
    flat_keys, flat_mask = (
        torch.nn.functional.pad(x.reshape(-1), (0, 1), value=none)
        for x, none in ((keys, -math.inf), (mask, False))
    )
    row_start = torch.arange(b * h, device=keys.device).mul(n).view(b, h, 1)
    first = (at[..., :-1] + row_start).reshape(-1)
    chosen = ((quota >= 2) & (quota < available)).nonzero()[:, 0]
    chosen = chosen[quota[chosen].argsort(descending=True, stable=True)]
    width = 2 ** (length[chosen] - 1).clamp(min=_NARROWEST - 1).double().log2().floor().long() * 2
    for w in width.unique().tolist():
        own = chosen[width == w]
        # Blocks that begin in a segment may end after it.
        inner = torch.arange(w + min(max_block, w), device=keys.device)
        inside = inner < length[own, None]
        position = torch.where(inside, first[own, None] + inner, keys.numel())
        score = flat_keys[position].double()
        inside = score > -math.inf
        score.masked_fill_(~inside, 0.0)
        least = delta * (score * flat_mask[position]).sum(-1)
        place = torch.arange(len(own), device=keys.device)
        yield _Segments(place, quota[own].long(), least, score, inside.double()), position


def _search(segments: _Segments, found: Tensor, max_block: int) -> Tensor:
    """Try block sizes from the longest down; what is accepted replaces the rows of `found`."""
    for size in range(min(max_block, int(segments.quota[0])), 1, -1):
        n = int((segments.quota >= size).sum())
        blocks = _take_blocks(segments.first(n), size)
        enough = blocks.kept_score >= segments.least[:n]
        accepted = enough.nonzero()[:, 0]
        if len(accepted):
            kept = _kept_tokens(_Blocks(*(t.index_select(0, accepted) for t in blocks)), size)
            found[segments.place[accepted], : kept.shape[1]] = kept
            rest = torch.nn.functional.pad(~enough, (0, len(segments.quota) - n), value=True)
            segments = segments.at(rest.nonzero()[:, 0])
        if len(segments.quota) == 0:
            break
    return found


class _Blocks(NamedTuple):
    """What P segments keep at one block size, M blocks each."""

    whole: Tensor  # [P, M] float64, 1 for blocks that are kept as they are
    cut: Tensor  # [P, b] positions of the cut block's tokens, the best first
    kept_of_cut: Tensor  # [P, b] which of these are kept
    kept_score: Tensor  # [P]


def _take_blocks(segments: _Segments, size: int) -> _Blocks:
    """Blocks of `size` by falling mean until the quota, the last one by its best tokens."""
    blocks = -(-(segments.score.shape[1] - size + 1) // size)
    shape = (blocks, size)
    score = segments.score[:, : blocks * size].unflatten(1, shape).sum(-1)
    count = segments.allowed[:, : blocks * size].unflatten(1, shape).sum(-1)
    # Blocks without an allowed token come last: their mean is 0 / 0.
    mean = (score / count).float().nan_to_num_(nan=-1.0)

    order = mean.sort(dim=-1, descending=True, stable=True).indices
    filled = count.gather(1, order).cumsum(1)
    fits = filled <= segments.quota[:, None]
    whole = torch.zeros_like(score).scatter_(1, order, fits.double())
    # The quota is less than the segment holds, so some block always does not fit.
    next_ = fits.sum(1, keepdim=True)
    rest = segments.quota[:, None] - (count * whole).sum(1, keepdim=True)
    inner = torch.arange(size, device=order.device)
    cut = order.gather(1, next_) * size + inner
    inside = segments.score.gather(1, cut) + (segments.allowed.gather(1, cut) - 1)
    ranked = inside.sort(dim=1, descending=True, stable=True)
    kept_of_cut = inner < rest
    kept_score = (score * whole).sum(1) + (ranked.values * kept_of_cut).sum(1)
    return _Blocks(whole, cut.gather(1, ranked.indices), kept_of_cut, kept_score)


def _kept_tokens(blocks: _Blocks, size: int) -> Tensor:
    """bool[P, M * size]."""
    kept = (blocks.whole > 0)[..., None].expand(-1, -1, size).flatten(1)
    return kept.scatter_(1, blocks.cut, blocks.kept_of_cut)
