"""Fixed chunks of keys: how well the mean stands for its chunk, and the chunks it fails."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from kv_score._checks import check_mask, check_positive, check_tensor

_CHUNK = 8192  # tokens turned to float32 at a time


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
    check_tensor("keys", keys, ndim=4)
    check_positive("size", size)
    if key_mask is not None:
        check_mask("key_mask", key_mask, (keys.shape[0], keys.shape[2]), keys.device)
    batch, heads, tokens, _ = keys.shape
    chunks = tokens // size
    lowest = torch.empty(batch, heads, chunks, device=keys.device)
    step = max(_CHUNK // size, 1)
    for start in range(0, chunks, step):
        stop = min(start + step, chunks)
        span = slice(start * size, stop * size)
        part = keys[:, :, span].float().unflatten(2, (stop - start, size))
        if key_mask is not None:
            hidden = ~key_mask[:, None, span, None].unflatten(2, (stop - start, size))
            part = part.masked_fill(hidden, 0.0)
        # The sum points where the mean does.
        total = part.sum(3, keepdim=True)
        cosine = torch.nn.functional.cosine_similarity(part, total, dim=-1)
        if key_mask is not None:
            cosine.masked_fill_(hidden[..., 0], math.inf)
        lowest[:, :, start:stop] = cosine.amin(3)
    return lowest


@torch.no_grad()
def chunk_outliers(
    keys: Float[Tensor, "b h t d"],
    size: int,
    count: int,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> Int64[Tensor, "b h count"]:
    """The `count` chunks per head that their mean stands for worst (lowest `chunk_cosine`).

    Shapes: `keys` [B, H, T, D] -> int64[B, H, count], chunk numbers ascending and unique; where a
    row has fewer chunks with keys, -1 fills the end. The lower chunk wins a tie. A chunk's tokens
    are number * size to number * size + size - 1. Masks and errors as in `chunk_cosine`;
    `count` may be 0. Source: ShadowKV Algorithm 1 (48 chunks of 8).
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"count must be an int, got {count!r}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    cosine = chunk_cosine(keys, size, key_mask=key_mask)
    chunks = cosine.shape[-1]
    order = cosine.sort(dim=-1, stable=True).indices[..., :count]
    missing = cosine.gather(-1, order) == math.inf
    order = order.masked_fill(missing, chunks).sort(-1).values
    order = torch.nn.functional.pad(order, (0, count - order.shape[-1]), value=chunks)
    return order.masked_fill(order == chunks, -1)
