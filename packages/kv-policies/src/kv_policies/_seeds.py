"""Who absorbs whom: similarities as bits, and the seeds they lead to.

A token is a seed unless an earlier seed is similar to it; otherwise it belongs to the first such
seed. That is what absorbing seed by seed comes to. Which of a tile's W tokens a token is similar
to are bits of a few words, so that a step over all tokens of many tiles is a few operations on
those words: int32[words, ..., W], the words in front.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

# Most bits of one word: sums of so many powers of two are exact in float32.
_BITS = 24


@lru_cache
def _bits(width: int) -> int:
    """Bits of each word, all words alike."""
    return next(bits for bits in range(min(width, _BITS), 0, -1) if width % bits == 0)


@lru_cache
def _powers(bits: int, device: torch.device) -> Tensor:
    return (1 << torch.arange(bits, device=device)).float()


@lru_cache
def _own_and_before(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32[words, W]: as bits, for each token of a tile itself, and those before it."""
    ones = torch.ones(width, width, device=device)
    return pack(ones.diag().diag()), pack(ones.tril(-1))


def pack(flags: Tensor) -> Tensor:
    """int32[words, ...]: flags [..., W], each 0 or 1, as bits, by one product."""
    bits = _bits(flags.shape[-1])
    words = flags.float().reshape(-1, bits) @ _powers(bits, flags.device)
    return words.view(*flags.shape[:-1], -1).movedim(-1, 0).int()


def settle(near: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Seeds of tiles, as bits [words, ...], and the place of each free token's seed [..., W].

    A free token without a similar free token before it is a seed; what is similar to a seed is
    taken. Repeated until no token is free: as many rounds as the longest chain of similar tokens.

    Args:
        near: int32[words, ..., W], bit s of token t is set where s and t are similar.
        free: bool[..., W], the tokens to be settled.
    """
    near, seeds = _settled(near, free)
    return seeds, first(near, seeds, free.shape[-1])


def count(near: Tensor, free: Tensor) -> Tensor:
    """int64[...]: how many of the tokens become seeds; arguments as of `settle`."""
    own, _ = _own_and_before(free.shape[-1], near.device)
    _, seeds = _settled(near, free)
    return free.shape[-1] - _none(seeds[..., None] & _as(own, seeds)).sum(-1)


def _settled(near: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of each token itself and of the similar ones before it, and of the seeds."""
    own, before = (_as(bits, near[..., 0]) for bits in _own_and_before(free.shape[-1], near.device))
    near = near & before | own
    left = pack(free)
    seeds = torch.zeros_like(left)
    while bool(left.any()):
        found = pack(_none(near & left[..., None] ^ own))
        seeds |= found
        free = free & _none(near & found[..., None])
        left = pack(free)
    return near, seeds


def _as(bits: Tensor, like: Tensor) -> Tensor:
    """Bits [words, W] as [words, 1, ..., 1, W], for all tiles of `like` [words, ...]."""
    return bits.view(len(bits), *[1] * (like.ndim - 1), -1)


def first(near: Tensor, seeds: Tensor, width: int) -> Tensor:
    """int64[...]: place of the first seed of a tile that is similar to each token, else `width`."""
    hit = near & seeds[..., None]
    place = torch.frexp((hit & -hit).float()).exponent - 1
    word = torch.arange(len(near), device=near.device, dtype=torch.int32)
    place += _bits(width) * word.view(-1, *[1] * (near.ndim - 1))
    return place.masked_fill_(hit == 0, width).amin(0).long()


def _none(words: Tensor) -> Tensor:
    """bool[..., W]: no bit is set in any word."""
    return (words[0] if len(words) == 1 else words.amax(0)) == 0
