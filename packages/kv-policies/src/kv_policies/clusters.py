"""SemantiCache's greedy seed clustering, over all chunks and heads at once.

A token is a seed unless an earlier seed of its chunk is similar to it; otherwise it belongs to the
first such seed. That is what absorbing seed by seed comes to, and it needs only the similarities
within a chunk. Short chunks are stacked by length; long ones go through in blocks of positions,
so that no more than a slab of similarities exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kv_policies import _check, _offsets

# Longest chunk whose similarities are taken at once; how many of them a slab may hold.
_BLOCK = 128
_SLAB = 2**21


def greedy_clusters(
    keys: Float[Tensor, "B H T D"],
    offsets: Int64[Tensor, "*rows S1"],
    theta: float | Float[Tensor, "B H"],
    *,
    valid: Bool[Tensor, "B T"] | None = None,
    check: bool = True,
) -> Int64[Tensor, "B H T"]:
    """`seed[t] = min {s <= t in t's chunk : s is a seed, s == t or cos(k_s, k_t) > theta}`.

    In each chunk the first free token is a seed and absorbs every later free token whose cosine
    with it exceeds `theta`; repeat until no token is free. A delimiter is a chunk of one token
    and stays as it is.

    Args:
        keys: [B, H, T, D]. A key of length zero has cosine 0 with every key.
        offsets: int64[S + 1] chunks, or int64[B, S + 1] where rows differ (repeats of T at the
            end).
        theta: threshold in [-1, 1], or float[B, H] one per row and head. Cosines are computed in
            float32 and cut to at most 1, so `theta = 1` merges nothing.
        valid: bool[B, T]; False marks padding, which is in no cluster.
        check: also check values.

    Returns:
        int64[B, H, T], position of the seed of each token's cluster, itself for a seed, -1 where
        not `valid`.

    Raises:
        TypeError: wrong dtype.
        ValueError: shapes or devices that do not fit, theta outside [-1, 1], NaN or infinity in
            `keys`, offsets out of order.

    Source: SemantiCache, section 2.3, Eq. 2, Algorithm 1.
    """
    table, valid = check_inputs(keys, offsets, valid, check=check)
    return cluster(keys, table, per_head(theta, keys), valid, stacks(keys, table, valid))


def check_inputs(
    keys: Tensor, offsets: Tensor, valid: Tensor | None, *, check: bool
) -> tuple[Tensor, Tensor]:
    """Offsets as int64[B, S + 1] and `valid` as bool[B, T]."""
    _check.shape("keys", keys, (None, None, None, None), "[B, H, T, D]")
    _check.floating("keys", keys)
    b, _, t, _ = keys.shape
    if valid is None:
        valid = torch.ones(b, t, dtype=torch.bool, device=keys.device)
    _check.shape("valid", valid, (b, t), "[B, T]")
    _check.dtype("valid", valid, torch.bool)
    _check.same_device("valid", valid, "keys", keys)
    table = _offsets.rows(offsets, keys, "keys", t, check=check).expand(b, -1)
    # NaN and infinity show in the sum, which is several times faster to take.
    if check and not bool(keys.sum(dtype=torch.float32).isfinite()):
        _check.refuse("keys", keys, ~keys.isfinite() & valid[:, None, :, None], "finite")
    return table, valid


def per_head(theta: float | Tensor, keys: Tensor) -> Tensor:
    """`theta` as float32[B, H], each in [-1, 1]."""
    if not isinstance(theta, Tensor):
        return keys.new_full(keys.shape[:2], _check.real("theta", theta, -1.0, 1.0)).float()
    _check.shape("theta", theta, tuple(keys.shape[:2]), "[B, H]")
    _check.floating("theta", theta)
    _check.same_device("theta", theta, "keys", keys)
    _check.refuse("theta", theta, ~(theta.abs() <= 1), "in [-1, 1]")
    return theta.float()


class Stack(NamedTuple):
    """C chunks of similar length, padded to W tokens."""

    row: Tensor  # [C]
    at: Tensor  # [C, W] positions in the row
    inside: Tensor  # [C, W] bool, tokens of the chunk that are valid
    cosine: Tensor  # [C, H, W, W] float32


def stacks(keys: Tensor, table: Tensor, valid: Tensor) -> Iterator[Stack]:
    """All chunks of 2 to _BLOCK tokens."""
    heads, t, dim = keys.shape[1:]
    flat = keys.reshape(-1, dim)
    length = table.diff(dim=1)
    width = (length + 3) // 4 * 4
    short = (length > 1) & (length <= _BLOCK)
    for w in width[short].unique().tolist():
        chosen = (short & (width == w)).nonzero()
        inner = torch.arange(w, device=keys.device)
        for slab in chosen.split(max(1, _SLAB // max(1, heads * w * w))):
            row, chunk = slab.unbind(1)
            inside = inner < length[row, chunk][:, None]
            at = torch.where(inside, table[row, chunk][:, None] + inner, 0)
            # Row numbers in [B * H * T, D] of [C, H, W]: one copy, in the layout of the product.
            head = row[:, None] * heads + torch.arange(heads, device=keys.device)
            number = head[:, :, None] * t + at[:, None]
            own = flat.index_select(0, number.reshape(-1)).view(*number.shape, -1)
            yield Stack(row, at, inside & valid[row[:, None], at], _cosine_within(own))


def cluster(
    keys: Tensor, table: Tensor, theta: Tensor, valid: Tensor, short: Iterable[Stack]
) -> Tensor:
    """`greedy_clusters` after the checks; `short` is what `stacks` gives."""
    heads, t = keys.shape[1:3]
    seeds = torch.where(valid, torch.arange(t, device=keys.device), -1)
    seeds = seeds[:, None].repeat(1, heads, 1)
    for row, at, inside, cosine in short:
        near = cosine > theta[row][:, :, None, None]
        near &= (inside[:, :, None] & inside[:, None, :])[:, None]
        found = _first_seeds(near)
        c, w = inside.nonzero().unbind(1)
        seeds[row[c], :, at[c, w]] = at[c[:, None], found[c, :, w]]
    length = table.diff(dim=1)
    for i, k in (length > _BLOCK).nonzero().tolist():
        a, z = table[i, k : k + 2].tolist()
        seeds[i, :, a:z] = _long_chunk(keys[i, :, a:z], theta[i], valid[i, a:z], a)
    return seeds


def _cosine_within(keys: Tensor) -> Tensor:
    """`_cosine(keys, keys)`, with the lengths taken from the product's diagonal."""
    keys = keys.float()
    product = keys @ keys.mT
    square = product.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(square > 0, square.rsqrt(), 0.0)
    product *= scale[..., None]
    product *= scale[..., None, :]
    return product.clamp_(max=1.0)


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """[..., W, V] float32, at most 1; 0 for keys of length zero."""
    one, other = one.float(), other.float()
    product = one @ other.mT
    for keys, axis in ((one, -1), (other, -2)):
        length = torch.linalg.vector_norm(keys, dim=-1)
        product *= torch.where(length > 0, 1 / length, 0.0).unsqueeze(axis)
    return product.clamp_(max=1.0)


def _first_seeds(near: Tensor) -> Tensor:
    """Seed of each token, int64[..., W]; `near[..., t, s]` is set where s may absorb t > s.

    One step per position, for all chunks and heads of a stack at once.
    """
    width = near.shape[-1]
    seed = torch.ones(near.shape[:-1], dtype=torch.bool, device=near.device)
    for t in range(1, width):
        seed[..., t] = ~(near[..., t, :t] & seed[..., :t]).any(-1)
    own = torch.arange(width, device=near.device)
    return torch.where(seed, own, _first(near & (own < own[:, None]), seed))


def _first(near: Tensor, seed: Tensor) -> Tensor:
    """The first s with `near[..., t, s]` and `seed[..., s]`, the width where there is none."""
    width = near.shape[-1]
    weight = torch.arange(width, 0, -1, device=near.device, dtype=torch.float32) * seed
    return width - (near * weight[..., None, :]).amax(-1).long()


def _long_chunk(keys: Tensor, theta: Tensor, valid: Tensor, first: int) -> Tensor:
    """Seeds of one chunk: keys [H, L, D] -> int64[H, L], block by block.

    The seeds of a block are settled when its turn comes; then they absorb the free tokens after it.
    """
    heads, length, _ = keys.shape
    label = torch.full((heads, length), -1, dtype=torch.int64, device=keys.device)
    limit = theta[:, None, None]
    for a in range(0, length, _BLOCK):
        z = min(a + _BLOCK, length)
        block = keys[:, a:z]
        free = (label[:, a:z] < 0) & valid[a:z]
        near = (_cosine_within(block) > limit) & free[:, :, None] & free[:, None, :]
        found = _first_seeds(near)
        seed = free & (found == torch.arange(z - a, device=keys.device))
        label[:, a:z] = torch.where(free, a + found, label[:, a:z])
        for c in range(z, length, 16 * _BLOCK):
            later = slice(c, c + 16 * _BLOCK)
            found = _first(_cosine(keys[:, later], block) > limit, seed)
            absorbed = (label[:, later] < 0) & valid[later] & (found < z - a)
            label[:, later] = torch.where(absorbed, a + found, label[:, later])
    return torch.where(label < 0, -1, label + first)
