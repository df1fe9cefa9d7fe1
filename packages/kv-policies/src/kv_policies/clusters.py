"""SemantiCache's greedy seed clustering, over all chunks and heads at once.

Chunks are stacked by length. Within a stack cosines are taken for a slab of chunks at a time and
shrink to one bit each; keys are fetched and multiplied a few chunks of a slab at a time, so that
they stay in the processor's cache. Chunks longer than a tile go through tile by tile, all chunks of
the stack together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kv_policies import _check, _offsets, _rows
from kv_policies._seeds import count, first, pack, settle

# Chunks are padded to widths for which products of small matrices are fast: _NARROW, multiples of
# _STEP or, above 4 _STEP, the next power of two or three quarters of it. Longer ones have tiles.
_NARROW = 4
_STEP = 8
_TILE = 128
# Squares of larger keys may not fit float32, and squares of shorter ones are zero in it.
_LARGEST = 1e17
_SHORTEST = 1e-19
# Numbers in a slab of cosines, and of keys that a thread multiplies at a time: what stays in its
# cache; and both on a GPU, which they fill.
_SLAB = 2**19
_FETCHED = 2**17
_ON_A_DEVICE = 2**25


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
        keys: [B, H, T, D], of any strides. A key of length zero has cosine 0 with every key.
        offsets: int64[S + 1] chunks, or int64[B, S + 1] where rows differ (repeats of T at the
            end).
        theta: threshold in [-1, 1], or float[B, H] one per row and head. Cosines are computed in
            float32; `theta = 1` merges nothing, whatever their rounding.
        valid: bool[B, T]; False marks padding, which is in no cluster.
        check: also check values. Either way the host waits for a GPU: how many tokens there are
            to settle decides how many steps it takes.

    Returns:
        int64[B, H, T], position of the seed of each token's cluster, itself for a seed, -1 where
        not `valid`.

    Raises:
        TypeError: wrong dtype.
        ValueError: shapes or devices that do not fit, theta outside [-1, 1], NaN, infinity or more
            than 1e17 in magnitude in `keys` of valid tokens, offsets out of order.

    Source: SemantiCache, section 2.3, Eq. 2, Algorithm 1.
    """
    _check.shape("keys", keys, (None, None, None, None), "[B, H, T, D]")
    limit = per_head(theta, keys, check=check)
    table, valid = check_inputs(keys, offsets, valid, check=check)
    return Chunks(keys, table, valid).seeds(limit)


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
    # One norm shows whether any key needs a closer look, in a fraction of the time.
    if check and not bool(torch.linalg.vector_norm(keys.detach()) <= _LARGEST):
        fine = keys.isfinite() & (keys.abs() <= _LARGEST)
        wrong = ~fine & valid[:, None, :, None]
        _check.refuse("keys", keys, wrong, f"finite and at most {_LARGEST:g} in magnitude")
    return table, valid


def per_head(theta: float | Tensor, keys: Tensor, *, check: bool) -> Tensor:
    """`theta` as float32[B, H], each in [-1, 1]."""
    if not isinstance(theta, Tensor):
        number = _check.real("theta", theta, -1.0, 1.0)
        return keys.new_full(keys.shape[:2], number, dtype=torch.float32)
    _check.shape("theta", theta, tuple(keys.shape[:2]), "[B, H]")
    _check.floating("theta", theta)
    _check.same_device("theta", theta, "keys", keys)
    if check:
        _check.refuse("theta", theta, ~(theta.abs() <= 1), "in [-1, 1]")
    return theta.float()


class Stack(NamedTuple):
    """C chunks of similar length, padded to W tokens."""

    row: Tensor  # [C]
    at: Tensor  # [C, W] positions in the row
    inside: Tensor  # [C, W] bool, tokens of the chunk that are valid
    number: Tensor  # [C, H, W] of each key among the rows


class Chunks:
    """The chunks of all rows and heads, to be clustered at one threshold or at several.

    `keep` is how many products may be held from one call of `seeds` to the next.
    """

    def __init__(self, keys: Tensor, table: Tensor, valid: Tensor, *, keep: int = 0) -> None:
        self._heads, self._tokens, self._dim = keys.shape[1:]
        self._valid, self._keep = valid, keep
        cpu = keys.device.type == "cpu"
        self._slab = _SLAB if cpu else _ON_A_DEVICE
        self._fetched = _FETCHED * torch.get_num_threads() if cpu else _ON_A_DEVICE
        self._held: dict[tuple[int, int, int, int], _Products] = {}
        self._stacks: list[Stack] = []
        if keys.shape[0] * self._heads * self._tokens:
            self._rows = _rows.rows(keys)
            self._stacks = list(self._stack(table))

    def _stack(self, table: Tensor) -> Iterator[Stack]:
        """Chunks of one token are left out: they are their own seed."""
        length = table.diff(dim=1)
        width = _padded(length)
        for w in width[length > 1].unique().tolist():
            row, chunk = ((length > 1) & (width == w)).nonzero().unbind(1)
            inner = torch.arange(w, device=row.device)
            inside = inner < length[row, chunk][:, None]
            at = table[row, chunk][:, None] + inner * inside
            number = self._rows.numbers(row, at, self._heads)
            yield Stack(row, at, inside & self._valid[row[:, None], at], number)

    def seeds(self, theta: Tensor) -> Tensor:
        """`greedy_clusters` after the checks, at `theta` [B, H]."""
        own = torch.arange(self._tokens, device=theta.device)
        seeds = torch.where(self._valid, own, -1)[:, None].repeat(1, self._heads, 1)
        for i, stack in enumerate(self._stacks):
            found = self._solve(i, _limits(theta)[stack.row])
            c, w = stack.inside.nonzero().unbind(1)
            seeds[stack.row[c], :, stack.at[c, w]] = stack.at[c[:, None], found[c, :, w]]
        return seeds

    def count(self, theta: Tensor) -> Tensor:
        """int64[B, H]: how many of the tokens are seeds at `theta` [B, H]."""
        seeds = self._valid.sum(1)[:, None].repeat(1, self._heads)
        for i, stack in enumerate(self._stacks):
            absorbed = self._absorbed(i, _limits(theta)[stack.row])
            seeds.index_add_(0, stack.row, absorbed, alpha=-1)
        return seeds

    def _absorbed(self, i: int, theta: Tensor) -> Tensor:
        """int64[C, H]: how many tokens of each chunk are not seeds."""
        inside = self._stacks[i].inside[:, None].expand_as(self._stacks[i].number)
        width = inside.shape[2]
        if width <= _TILE:  # whose seed a token has need not be known
            whole = slice(0, width)
            return inside.sum(-1) - count(self._near(i, whole, whole, theta), inside)
        inner = torch.arange(width, device=theta.device)
        return ((self._solve(i, theta) != inner) & inside).sum(-1)

    def _solve(self, i: int, theta: Tensor) -> Tensor:
        """int64[C, H, W]: where in its chunk each token's seed is, tile by tile.

        The seeds of a tile are settled when its turn comes; then they absorb the free tokens
        after it.
        """
        inside = self._stacks[i].inside[:, None]
        width = inside.shape[2]
        piece = _TILE * max(1, self._slab // (self._heads * _TILE * max(_TILE, self._dim)))
        seed = torch.full_like(self._stacks[i].number, width)
        for a in range(0, width, _TILE):
            tile = slice(a, min(a + _TILE, width))
            free = (seed[..., tile] == width) & inside[..., tile]
            seeds, found = settle(self._near(i, tile, tile, theta), free)
            seed[..., tile] = torch.where(free, a + found, seed[..., tile])
            for c in range(tile.stop, width, piece):
                later = slice(c, min(c + piece, width))
                found = first(self._near(i, later, tile, theta), seeds, tile.stop - a)
                absorbed = (seed[..., later] == width) & (found < tile.stop - a)
                seed[..., later] = torch.where(absorbed, a + found, seed[..., later])
        return seed

    def _near(self, i: int, rows: slice, columns: slice, theta: Tensor) -> Tensor:
        """int32[words, C, H, W]: to which of `columns` each of `rows` is similar, as bits."""
        ones, others = (self._stacks[i].number[..., span] for span in (rows, columns))
        width = others.shape[2]
        step = max(1, self._slab // (self._heads * ones.shape[2] * width))
        near = []
        for start in range(0, len(ones), step):
            part = slice(start, start + step)
            place = (i, rows.start, columns.start, start)
            products = self._held.get(place)
            if products is None:
                products = self._products(ones[part], None if rows == columns else others[part])
                if products.of_units.numel() <= self._keep:
                    self._keep -= products.of_units.numel()
                    self._held[place] = products
            similar = torch.empty_like(products.of_units)  # float32 is what `pack` multiplies
            limit = theta[part, :, None, None] * products.length
            near.append(pack(torch.gt(products.of_units, limit, out=similar)))
        return torch.cat(near, dim=1)

    def _products(self, ones: Tensor, others: Tensor | None) -> _Products:
        """float32, of keys with numbers `ones` [C, H, W] and `others` [C, H, V]; None: `ones`."""
        sides = [ones] if others is None else [ones, others]
        product = torch.empty(*ones.shape, sides[-1].shape[2], device=ones.device)
        lengths = [torch.empty(side.shape, device=ones.device) for side in sides]
        step = max(1, self._fetched // (self._heads * max(product.shape[2:]) * self._dim))
        for start in range(0, len(ones), step):
            part = slice(start, start + step)
            keys = [self._rows.take(side[part]) for side in sides]
            one, other = (k.flatten(0, 1) for k in (keys[0], keys[-1]))
            torch.bmm(one, other.mT, out=product[part].flatten(0, 1))
            if others is not None:
                for length, k in zip(lengths, keys, strict=True):
                    torch.linalg.vector_norm(k, dim=-1, out=length[part])
        if others is None:
            lengths = [product.diagonal(dim1=-2, dim2=-1).sqrt()]
        for length in lengths:
            length.clamp_(min=_SHORTEST)
        product /= lengths[-1][..., None, :]
        return _Products(product, lengths[0][..., None])


def _limits(theta: Tensor) -> Tensor:
    """What cosines must exceed: rounding may lift those of equal keys above 1."""
    return theta.masked_fill(theta >= 1, math.inf)


def _padded(length: Tensor) -> Tensor:
    """The width of the stack that a chunk of each length goes to."""
    half = 2 ** (length - 1).clamp(min=1).double().log2().floor().long() // 2
    step = torch.where(length <= _TILE, half.clamp(min=_STEP), _TILE)
    return torch.where(length <= _NARROW, _NARROW, -(-length // step) * step)


class _Products(NamedTuple):
    """The cosine of t and s is `of_units[..., t, s] / length[..., t, 0]`."""

    of_units: Tensor  # [C, H, W, V], key t by key s over its length; 0 for keys of length zero
    length: Tensor  # [C, H, W, 1], not zero
