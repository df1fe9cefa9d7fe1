"""Bounds of the keys of fixed pages, and what a query's dot product with a page can reach."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from kv_score._checks import (
    check_choice,
    check_mask,
    check_positive,
    check_queries_and_keys,
    check_shape,
    check_tensor,
)
from kv_score._groups import pack

_CHUNK = 8192  # tokens looked at together where a mask forces a copy


def page_mask(key_mask: Bool[Tensor, "b t"], size: int) -> Bool[Tensor, "b p"]:
    """Which pages of `size` tokens hold at least one key: any over each page; P = ceil(T / size).

    Shapes: bool[B, T] -> bool[B, P]. Raises ValueError or TypeError for a wrong mask or size.
    """
    check_tensor("key_mask", key_mask, ndim=2, floating=False)
    check_mask("key_mask", key_mask, tuple(key_mask.shape), key_mask.device)
    check_positive("size", size)
    tokens = key_mask.shape[1]
    pages = -(-tokens // size)
    padded = torch.nn.functional.pad(key_mask, (0, pages * size - tokens))
    return padded.unflatten(1, (pages, size)).any(2)


@torch.no_grad()
def page_bounds(
    keys: Float[Tensor, "b h t d"],
    size: int,
    *,
    key_mask: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b h p d"], Float[Tensor, "b h p d"]]:
    """Smallest and largest value of each channel in each page of `size` keys.

    lower_pd = min_{j in p} k_jd, upper_pd = max_{j in p} k_jd; the last page may be shorter.
    Pages are counted from position 0 for all rows, padding included.

    Shapes: `keys` [B, H, T, D] -> two [B, H, P, D] of the same dtype, P = ceil(T / size).
    `key_mask` is True where a key exists; the others are not read, and a page without any has
    bounds 0 (see `page_mask`, whose result `bound_scores` takes).
    Raises ValueError or TypeError for wrong shapes, dtypes, devices, `size`. Source: Quest, 3.2.
    """
    check_tensor("keys", keys, ndim=4)
    check_positive("size", size)
    if key_mask is not None:
        check_mask("key_mask", key_mask, (keys.shape[0], keys.shape[2]), keys.device)
    batch, heads, tokens, width = keys.shape
    pages = -(-tokens // size)
    lower = keys.new_empty(batch, heads, pages, width)
    upper = torch.empty_like(lower)
    whole = tokens // size * size
    step = max(_CHUNK // size, 1) * size
    spans = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    if whole < tokens:
        spans.append((whole, tokens))
    for start, stop in spans:
        part = keys[:, :, start:stop].unflatten(2, (-1, min(size, stop - start)))
        low, high = part, part
        if key_mask is not None:
            hidden = ~key_mask[:, None, start:stop, None].unflatten(2, part.shape[2:4])
            low, high = part.masked_fill(hidden, math.inf), part.masked_fill(hidden, -math.inf)
        page = slice(start // size, start // size + part.shape[2])
        torch.amin(low, 3, out=lower[:, :, page])
        torch.amax(high, 3, out=upper[:, :, page])
    if key_mask is not None:
        empty = ~page_mask(key_mask, size)[:, None, :, None]
        lower.masked_fill_(empty, 0.0)
        upper.masked_fill_(empty, 0.0)
    return lower, upper


@torch.no_grad()
def bound_scores(
    queries: Float[Tensor, "b h_q n d"],
    lower: Float[Tensor, "b h_kv p d"],
    upper: Float[Tensor, "b h_kv p d"],
    *,
    reduce: Literal["none", "kv_head"] = "kv_head",
    mask: Bool[Tensor, "b p"] | None = None,
    query_mask: Bool[Tensor, "b n"] | None = None,
) -> Float32[Tensor, "b h_out p"]:
    """Largest dot product that a query could have with any key inside a page's bounds.

    u_p = max_n sum_d max(q_nd * lower_pd, q_nd * upper_pd), the maximum over the N queries and,
    with `reduce="kv_head"`, over the group's heads too: never below a true dot product (beyond
    float32 rounding). Not scaled.

    Shapes: `queries` [B, H_q, N, D]; bounds [B, H_kv, P, D]; result float32[B, H_kv, P], or
    [B, H_q, P] with `reduce="none"`. `mask` [B, P] is False for pages without keys: -inf.
    `query_mask` [B, N] is True where a query exists; the others are not read, and a row without
    any query scores -inf.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices, `reduce`, N = 0.
    Source: Quest section 3.3 (one query per step there; the maxima are ours).
    """
    group = check_queries_and_keys("queries", queries, "lower", lower)
    check_queries_and_keys("queries", queries, "upper", upper)
    check_shape("upper", upper, lower.shape)
    check_choice("reduce", reduce, ("none", "kv_head"))
    if queries.shape[2] == 0:
        raise ValueError(f"queries must hold at least one query, got shape {tuple(queries.shape)}")
    if mask is not None:
        check_mask("mask", mask, (lower.shape[0], lower.shape[2]), lower.device)
    if query_mask is not None:
        check_mask("query_mask", query_mask, (len(queries), queries.shape[2]), queries.device)
        queries = queries.masked_fill(~query_mask[:, None, :, None], 0.0)
    packed = pack(queries, lower.shape[1])
    # max(q*lo, q*up) is q*up for q > 0 and q*lo otherwise: two products, no [.., P, D] in between.
    reach = packed.clamp_min(0.0) @ upper.float().mT
    reach += packed.clamp_max(0.0) @ lower.float().mT
    reach = reach.unflatten(2, (group, -1))
    if query_mask is not None:
        reach.masked_fill_(~query_mask[:, None, None, :, None], -math.inf)
    reach = reach.amax(3)
    scores = reach.flatten(1, 2) if reduce == "none" else reach.amax(2)
    return scores if mask is None else scores.masked_fill(~mask[:, None], -math.inf)
