"""Importance of keys as the attention they receive: an observation window, or every query."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from kv_score._checks import (
    check_choice,
    check_mask,
    check_number,
    check_positive,
    check_queries_and_keys,
)
from kv_score._groups import REDUCTIONS, Reduce, pack, reduce_groups, reduced_heads


def window_attention(
    queries: Float[Tensor, "b h_q n d"],
    keys: Float[Tensor, "b h_kv t d"],
    *,
    scale: float | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    reduce: Reduce = "none",
    chunk: int = 4096,
) -> Float32[Tensor, "b h_out t-n"]:
    """Attention that the last N queries pay to each of the T - N earlier keys, summed.

    s_j = sum_i softmax_k(scale * q_i . k_k)_j, over the keys that query i sees (causal, not
    masked); the softmax is over all of them, those inside the window included.

    Shapes: `queries` are those of the last N of the T positions of `keys`; H_q is a multiple of
    H_kv. `scale` is 1/sqrt(D) unless given. `key_mask` is True where a key exists; the others are
    never read and score -inf, and a query at such a position counts for nothing.
    `reduce`: `none` keeps query heads (H = H_q), `kv_head` takes the mean of each group
    (H = H_kv), `layer` the mean of all heads (H = 1). Everything is computed in float32; two
    passes over the keys in chunks of `chunk`, or one where a chunk holds all of them, take
    O(H_q * N * chunk) numbers.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, N > T, `reduce`, `chunk`.
    Source: SnapKV; SentenceKV section 4.1 (alpha_i); SABlock Eqs. 3 and 4 (`reduce="layer"`).
    """
    _check(queries, keys, scale, key_mask, reduce, {"chunk": chunk})
    end = keys.shape[2] - queries.shape[2]
    return _received(queries, keys, scale, key_mask, reduce, chunk, end)


def accumulated_attention(
    queries: Float[Tensor, "b h_q n d"],
    keys: Float[Tensor, "b h_kv t d"],
    *,
    scale: float | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    reduce: Reduce = "none",
    chunk: int = 4096,
    query_chunk: int = 128,
) -> Float32[Tensor, "b h_out t"]:
    """Attention that each key receives from all queries given: column sums of causal attention.

    s_j = sum_i A_ij with A the causal softmax; with N = T the whole matrix, never held: memory is
    O(H_q * query_chunk * chunk) beside the result, time O(T^2). A sum, not a mean: early keys are
    seen by more queries, as in H2O. Shapes, masks, `reduce` and errors as in `window_attention`,
    but all T keys are scored, those of the queries' own positions included.

    Source: H2O (Zhang et al. 2023), section 4.
    """
    _check(queries, keys, scale, key_mask, reduce, {"chunk": chunk, "query_chunk": query_chunk})
    count, tokens = queries.shape[2], keys.shape[2]
    heads = reduced_heads(queries.shape[1], keys.shape[1], reduce)
    scores = torch.zeros(queries.shape[0], heads, tokens, device=keys.device)
    for start in range(0, count, query_chunk):
        block = queries[:, :, start : start + query_chunk]
        end = tokens - count + start + block.shape[2]
        mask = None if key_mask is None else key_mask[:, :end]
        scores[..., :end] += _received(block, keys[:, :, :end], scale, mask, reduce, chunk, end)
    if key_mask is not None:
        scores.masked_fill_(~key_mask[:, None], -math.inf)
    return scores


def _check(
    queries: Tensor,
    keys: Tensor,
    scale: float | None,
    key_mask: Tensor | None,
    reduce: str,
    chunks: dict[str, int],
) -> None:
    check_queries_and_keys("queries", queries, "keys", keys)
    if queries.shape[2] > keys.shape[2]:
        raise ValueError(
            f"queries must be those of the last positions of keys, got {queries.shape[2]} queries "
            f"for {keys.shape[2]} keys"
        )
    if scale is not None:
        check_number("scale", scale)
    if key_mask is not None:
        check_mask("key_mask", key_mask, (keys.shape[0], keys.shape[2]), keys.device)
    check_choice("reduce", reduce, REDUCTIONS)
    for name, value in chunks.items():
        check_positive(name, value)


@torch.no_grad()
def _received(
    queries: Tensor,
    keys: Tensor,
    scale: float | None,
    key_mask: Tensor | None,
    reduce: Reduce,
    chunk: int,
    end: int,
) -> Tensor:
    """What the first `end` keys receive from the last N queries: float32[B, H, end]."""
    batch, heads, count, size = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    # Logits are taken in powers of two, which are faster than those of e.
    packed = pack(queries, kv_heads) * (
        (size**-0.5 if scale is None else scale) * math.log2(math.e)
    )
    unseen = None
    if key_mask is not None:
        # A query at a position that does not exist may hold anything: it must not reach a sum.
        unseen = ~key_mask[:, None, None, tokens - count :]
        unseen = unseen.expand(batch, kv_heads, group, count).flatten(2)[..., None]
        packed = packed.masked_fill(unseen, 0.0)

    def logits(start: int, stop: int) -> Tensor:
        part = packed @ keys[:, :, start:stop].float().mT  # [B, H_kv, G*N, chunk]
        if key_mask is not None:
            part.masked_fill_(~key_mask[:, None, None, start:stop], -math.inf)
        if stop > tokens - count:
            position = torch.arange(tokens - count, tokens, device=keys.device)
            future = torch.arange(start, stop, device=keys.device) > position[:, None]
            part.unflatten(2, (group, count)).masked_fill_(future, -math.inf)
        return part

    # The maximum and the sum stay apart: as one number, large logits would eat the sum's digits.
    top = torch.full((*packed.shape[:-1], 1), torch.finfo(torch.float32).min, device=keys.device)
    total = torch.zeros_like(top)
    for start in range(0, tokens, chunk):
        part = logits(start, min(start + chunk, tokens))
        higher = torch.maximum(top, part.amax(-1, keepdim=True))
        total.mul_(torch.exp2(top - higher)).add_(part.sub_(higher).exp2_().sum(-1, keepdim=True))
        top = higher
        if tokens > chunk:
            del part  # or the next chunk is built beside it
    if unseen is not None:
        total.masked_fill_(unseen, math.inf)

    scores = torch.empty(batch, reduced_heads(heads, kv_heads, reduce), end, device=keys.device)
    for start in range(0, end, chunk):
        stop = min(start + chunk, end)
        # What the first pass left of its only chunk is what the second would build.
        part = part[..., :end] if tokens <= chunk else logits(start, stop).sub_(top).exp2_()
        mass = part.div_(total).unflatten(2, (group, count)).sum(3)
        del part
        scores[..., start:stop] = reduce_groups(mass, reduce)
    if key_mask is not None:
        scores.masked_fill_(~key_mask[:, None, :end], -math.inf)
    return scores
