"""Greedy seed clustering in plain torch: all heads and all chunks of about one length at once."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128  # tokens decided together
EARLIER = 4096  # earlier tokens a tile is compared with at a time
PAIRS = 1 << 22  # cosines held at a time


def cluster(keys: Tensor, offsets: Tensor, theta: float) -> Tensor:
    """See `kv_attn_triton.cluster`."""
    batch, heads, n, _ = keys.shape
    device = keys.device
    seeds = torch.arange(n, device=device).expand(batch, heads, n).clone()
    if seeds.numel() == 0:
        return seeds
    starts, sizes = offsets[:-1].to(device), offsets.diff().to(device)
    # chunks of 2, of 3 to 4, of 5 to 8 ... tokens: at most half of a table is padding
    powers = torch.log2(sizes.double()).ceil().long()
    for power in powers.unique().tolist():
        if power == 0:
            continue
        chosen = (powers == power).nonzero().flatten()
        width = 1 << power
        tile = min(width, TILE)
        fits = max(1, PAIRS // (batch * heads * tile * min(width, EARLIER)))
        for some in chosen.split(fits):
            _solve(keys, seeds, starts[some], sizes[some], width, tile, theta)
    return seeds


def _solve(
    keys: Tensor, seeds: Tensor, starts: Tensor, sizes: Tensor, width: int, tile: int, theta: float
) -> None:
    """Writes the seeds of chunks [C] of at most `width` tokens into seeds [B, H, N], in place.

    A token belongs to the first seed before it that is similar, and is a seed itself without
    one; so a tile is settled by the seeds of the tiles before it, then by those of its own.
    """
    batch, heads = keys.shape[:2]
    place = torch.arange(width, device=keys.device)
    valid = place < sizes.unsqueeze(1)
    token = starts.unsqueeze(1) + place.minimum((sizes - 1).unsqueeze(1))
    owner = torch.full((batch, heads, len(starts), width), width, device=keys.device)
    for t in range(0, width, tile):
        now = slice(t, t + tile)
        mine = _unit(keys, token[:, now])
        first = owner[..., now]
        for e in range(0, t, EARLIER):
            past = slice(e, min(e + EARLIER, t))
            links = _similar(_unit(keys, token[:, past]), mine, theta)
            links &= (owner[..., past] == place[past]).unsqueeze(-1)
            first = first.minimum(_first(links, place[past], width))
        later = place[now] > place[now].unsqueeze(-1)
        links = _similar(mine, mine, theta) & later
        seed = _seeds(links, valid[:, now] & (first == width))
        first = first.minimum(_first(links & seed.unsqueeze(-1), place[now], width))
        owner[..., now] = torch.where(seed, place[now], first)
    seeds[:, :, token[valid]] = starts.unsqueeze(1).add(owner)[..., valid]


def _seeds(links: Tensor, free: Tensor) -> Tensor:
    """Which free tokens become seeds, links [.., i, j] being "i < j and similar".

    A token with no similar free token before it is a seed; what is similar to a seed is taken.
    Repeated until all are one or the other: as many rounds as the longest chain, not as tokens.
    """
    seed = torch.zeros_like(free)
    while bool(free.any()):
        found = free & ~(links & free.unsqueeze(-1)).any(-2)
        seed |= found
        free = free & ~found & ~(links & found.unsqueeze(-1)).any(-2)
    return seed


def _first(links: Tensor, place: Tensor, none: int) -> Tensor:
    """For each j the lowest place i with links[.., i, j], or `none`."""
    return torch.where(links, place.unsqueeze(-1), none).amin(-2)


def _similar(a: Tensor, b: Tensor, theta: float) -> Tensor:
    # rounding may lift the cosine of equal keys above 1, which theta = 1 must still forbid
    return (a @ b.transpose(-1, -2)).clamp_max_(1.0) > theta


def _unit(keys: Tensor, token: Tensor) -> Tensor:
    """Rows keys[:, :, token] over their length, float32; a zero key stays zero."""
    rows = keys.index_select(2, token.reshape(-1)).float()
    rows = torch.nn.functional.normalize(rows, dim=-1, eps=1e-30)
    return rows.view(*keys.shape[:2], *token.shape, keys.shape[3])
