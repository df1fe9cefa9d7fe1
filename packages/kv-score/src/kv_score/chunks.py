"""Fixed chunks of keys: their means, how well a mean stands for its chunk, and those it fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from kv_score._checks import check_choice, check_mask, check_positive, check_tensor

OutlierBy: TypeAlias = Literal["cosine", "distance"]

# Numbers turned to float32 at a time: what a CPU's cache holds, and what keeps a GPU busy.
_BLOCK, _BLOCK_DEVICE = 1 << 18, 1 << 25


@torch.no_grad()
def chunk_mean(
    keys: Float[Tensor, "b h t d"],
    size: int,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h chunks d"]:
    """Mean key of each chunk, ShadowKV's landmark.

    Shapes: `keys` [B, H, T, D] -> [B, H, T // size, D] in the dtype of `keys`, summed in float32
    at least. A chunk without keys has mean 0. Chunks, mask and errors as in `chunk_cosine`.
    Source: ShadowKV Algorithm 1 (C).
    """
    _check(keys, size, key_mask)
    batch, heads, tokens, width = keys.shape
    means = keys.new_empty(batch, heads, tokens // size, width)
    for span, part, hidden in _blocks(keys, size, key_mask):
        means[:, :, span] = _mean(part, hidden).squeeze(3).to(keys.dtype)
    return means


@torch.no_grad()
def chunk_cosine(
    keys: Float[Tensor, "b h t d"],
    size: int,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> Float32[Tensor, "b h chunks"]:
    """Lowest cosine between a chunk's keys and their mean: min_{j in c} cos(k_j, mean_c k).

    Shapes: `keys` [B, H, T, D] -> float32[B, H, T // size]: whole chunks only, an unfinished one
    at the end is not a chunk. A zero vector has cosine 0. `key_mask` is True where a key exists;
    the others are not read, and a chunk without any has cosine +inf (nothing to fail). Chunks
    are counted from position 0 for all rows, so padding at the left moves a row's own chunks
    unless it is a multiple of `size`; a chunk that padding cuts is judged by the keys it has.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices, `size`.
    Source: ShadowKV Algorithm 1.
    """

    def lowest(part: Tensor, hidden: Tensor | None) -> Tensor:
        # The sum points where the mean does.
        cosine = torch.nn.functional.cosine_similarity(part, part.sum(3, keepdim=True), dim=-1)
        return (cosine if hidden is None else cosine.masked_fill(hidden[..., 0], math.inf)).amin(3)

    return _by_chunk(keys, size, key_mask, lowest)


@torch.no_grad()
def chunk_distance(
    keys: Float[Tensor, "b h t d"],
    size: int,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> Float32[Tensor, "b h chunks"]:
    """Largest distance of a chunk's keys from their mean: max_{j in c} |k_j - mean_c k|.

    For a query q it bounds what the mean gets wrong: |q . k_j - q . mean| <= |q| times it. A
    cosine does not: keys of one direction and unequal lengths have cosine 1. Shapes, mask and
    errors as in `chunk_cosine`; a chunk without keys has distance -inf.
    """

    def farthest(part: Tensor, hidden: Tensor | None) -> Tensor:
        distance = torch.linalg.vector_norm(part - _mean(part, hidden), dim=-1)
        return (
            distance if hidden is None else distance.masked_fill(hidden[..., 0], -math.inf)
        ).amax(3)

    return _by_chunk(keys, size, key_mask, farthest)


@torch.no_grad()
def chunk_outliers(
    keys: Float[Tensor, "b h t d"],
    size: int,
    count: int,
    *,
    by: OutlierBy = "cosine",
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> Int64[Tensor, "b h count"]:
    """The `count` chunks per head that their mean stands for worst.

    by: `cosine` takes the lowest `chunk_cosine`, as ShadowKV does; `distance` the highest
    `chunk_distance`. Shapes: `keys` [B, H, T, D] -> int64[B, H, count], chunk numbers ascending
    and unique; where a row has fewer chunks with keys, -1 fills the end. The lower chunk wins a
    tie. A chunk's tokens are number * size to number * size + size - 1. Masks and errors as in
    `chunk_cosine`; `count` may be 0. Source: ShadowKV Algorithm 1 (48 chunks of 8).
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"count must be an int, got {count!r}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    check_choice("by", by, ("cosine", "distance"))
    if by == "cosine":
        fit = chunk_cosine(keys, size, key_mask=key_mask)
    else:
        fit = -chunk_distance(keys, size, key_mask=key_mask)
    chunks = fit.shape[-1]
    order = fit.sort(dim=-1, stable=True).indices[..., :count]
    missing = fit.gather(-1, order) == math.inf
    order = order.masked_fill(missing, chunks).sort(-1).values
    order = torch.nn.functional.pad(order, (0, count - order.shape[-1]), value=chunks)
    return order.masked_fill(order == chunks, -1)


def _check(keys: Tensor, size: int, key_mask: Tensor | None) -> None:
    check_tensor("keys", keys, ndim=4)
    check_positive("size", size)
    if key_mask is not None:
        check_mask("key_mask", key_mask, (keys.shape[0], keys.shape[2]), keys.device)


def _by_chunk(
    keys: Tensor,
    size: int,
    key_mask: Tensor | None,
    score: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """`score` of every chunk: float32[B, H, T // size]."""
    _check(keys, size, key_mask)
    scores = torch.empty(*keys.shape[:2], keys.shape[2] // size, device=keys.device)
    for span, part, hidden in _blocks(keys, size, key_mask):
        scores[:, :, span] = score(part, hidden)
    return scores


def _blocks(
    keys: Tensor, size: int, key_mask: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Some chunks at a time: which, their keys [B, H, n, size, D] in float32 at least, 0 where
    there is none, and where that is, [B, 1, n, size, 1]."""
    batch, heads, tokens, width = keys.shape
    chunks = tokens // size
    numbers = _BLOCK if keys.device.type == "cpu" else _BLOCK_DEVICE
    step = max(numbers // max(batch * heads * size * width, 1), 1)
    work = torch.promote_types(keys.dtype, torch.float32)
    for start in range(0, chunks, step):
        stop = min(start + step, chunks)
        span = slice(start * size, stop * size)
        part, hidden = keys[:, :, span].to(work).unflatten(2, (stop - start, size)), None
        if key_mask is not None:
            hidden = ~key_mask[:, None, span, None].unflatten(2, (stop - start, size))
            part = part.masked_fill(hidden, 0.0)
        yield slice(start, stop), part, hidden


def _mean(part: Tensor, hidden: Tensor | None) -> Tensor:
    """Mean of the keys there are: [B, H, n, 1, D]."""
    if hidden is None:
        return part.mean(3, keepdim=True)
    return part.sum(3, keepdim=True) / (~hidden).sum(3, keepdim=True).clamp(min=1)
