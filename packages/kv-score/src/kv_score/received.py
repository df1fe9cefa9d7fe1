"""Attention and what each key receives of it, in one pass over the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from kv_score._checks import (
    check_choice,
    check_device,
    check_number,
    check_positive,
    check_queries_and_keys,
    check_tensor,
)
from kv_score._groups import REDUCTIONS, Reduce, reduce_groups
from kv_score._products import product

_LOG2_E = math.log2(math.e)  # softmax in powers of two, which are the faster ones
_RANGE = 112  # where sums stay below 2**_RANGE: float32 ends at 2**128
_SPAN = 4096  # keys whose weights are built at a time, and used while in a CPU's cache


@torch.no_grad()
def attend_and_accumulate(
    queries: Float[Tensor, "b h_q n d"],
    keys: Float[Tensor, "b h_kv t d"],
    values: Float[Tensor, "b h_kv t e"],
    *,
    scale: float | None = None,
    reduce: Reduce = "none",
    rows: int = 256,
) -> tuple[Float[Tensor, "b h_q n e"], Float32[Tensor, "b h_out t"]]:
    """Causal attention of the last N of T positions, and `accumulated_attention` of the same.

    out_i = sum_j A_ij v_j and s_j = sum_i A_ij, with A built once where attention and then
    `accumulated_attention` would build it three times. A method that needs the sums of a prompt
    (H2O) takes its prompt's attention from here.

    Shapes, `scale` and `reduce` as in `accumulated_attention`; `out` has the queries' dtype. Logits
    and softmax are float32. Holds `rows` rows of A at a time, for one KV head on a CPU and for all
    of them elsewhere: O(rows * T) numbers each.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, N > T, `reduce`, `rows`.
    Source: H2O (Zhang et al. 2023), section 4.
    """
    check_queries_and_keys("queries", queries, "keys", keys)
    check_tensor("values", values, ndim=4)
    check_device("values", values, keys.device)
    batch, heads, count, size = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"values must be those of keys, got {list(values.shape)} for {list(keys.shape)}"
        )
    if count > tokens:
        raise ValueError(
            f"queries must be those of the last positions of keys, got {count} queries for "
            f"{tokens} keys"
        )
    if scale is not None:
        check_number("scale", scale)
    check_choice("reduce", reduce, REDUCTIONS)
    check_positive("rows", rows)
    scale, group, width = size**-0.5 if scale is None else scale, heads // kv_heads, values.shape[3]
    out = queries.new_empty(batch * kv_heads, group, count, width)
    received = torch.zeros(batch * kv_heads, group, tokens, device=keys.device)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    asked = queries.reshape(batch * kv_heads, group, count, size)
    together = 1 if keys.device.type == "cpu" else batch * kv_heads
    block = max(min(rows // group, count), 1)
    future = torch.full((block, block), -math.inf, device=keys.device).triu(1)
    room = torch.empty(together * group * block * tokens, device=keys.device)
    tame = _tame(asked, keys, values, abs(scale) * _LOG2_E, block)
    for first in range(0, batch * kv_heads, together):
        part = slice(first, first + together)
        # rows of one head, which else lie between those of others
        own_keys, own_values = keys[part].float().contiguous(), values[part].contiguous()
        for number, start in enumerate(range(0, count, block)):
            stop = min(start + block, count)
            new, end = stop - start, tokens - count + stop
            spans = _spans(end, end - new)
            packed = asked[part, :, start:stop].flatten(1, 2).float() * (scale * _LOG2_E)
            total = torch.zeros(*packed.shape[:2], 1, device=keys.device)
            attended = torch.zeros(*packed.shape[:2], width, device=keys.device)
            calm = bool(tame[part, number].all())
            weights = []
            made = _weights(packed, own_keys, spans, future[:new, :new], room, calm)
            for at, some in zip(spans, made, strict=True):
                total += some.sum(-1, keepdim=True)
                attended += product(some.to(values.dtype), own_values[:, at].mT)
                weights.append(some)
            # The rows are divided by their sums not here but where they are added up.
            share = total.reciprocal_()
            out[part, :, start:stop] = attended.mul_(share).unflatten(1, (group, new))
            for at, some in zip(spans, weights, strict=True):
                sums = share.view(-1, 1, new) @ some.view(-1, new, some.shape[-1])
                received[part, :, at] += sums.view(-1, group, some.shape[-1])
    scores = reduce_groups(received.unflatten(0, (batch, kv_heads)), reduce)
    return out.view(batch, heads, count, width), scores


def _spans(end: int, whole: int) -> list[slice]:
    """[0, end) in pieces of `_SPAN`, of which the last one holds all from `whole` on."""
    return [slice(*x) for x in pairwise((*range(0, max(whole, 1), _SPAN), end))]


def _weights(
    queries: Tensor, keys: Tensor, spans: list[slice], future: Tensor, room: Tensor, calm: bool
) -> Iterator[Tensor]:
    """Powers of two of the logits, span by span, [L, G*N, keys of a span], which lie in `room`.

    Up to a factor for each row, its largest logit unless `calm`: one span is then done with, and
    still in the CPU's cache, before the next is built.

    queries: [L, G*N, D], of N tokens; keys: [L, T, D], of which `spans` ends with those tokens'
    own; future: [N, N], added to the logits of tokens for each other.
    """
    count, new = queries.shape[0] * queries.shape[1], len(future)
    logits = []
    for at in spans:
        part = product(queries, keys[:, at])
        if at is spans[-1]:
            part.unflatten(1, (-1, new))[..., -new:].add_(future)
        own = room[count * at.start : count * at.stop].view(part.shape)
        if calm:
            yield torch.exp2(part, out=own)
        else:
            logits.append(own.copy_(part))
    if logits:
        tops = [part.amax(-1, keepdim=True) for part in logits]
        top = torch.cat(tops, -1).amax(-1, keepdim=True)
        for part in logits:
            yield part.sub_(top).exp2_()


def _tame(queries: Tensor, keys: Tensor, values: Tensor, scale: float, block: int) -> Tensor:
    """bool[L, blocks] on the host: where no weight needs its row's largest logit taken off.

    A logit is at most |q| |k| scale in magnitude, so that neither sums of T weights 2**logit, as
    they are, nor those of weighted values overflow, and what a row loses to underflow is less than
    2**(_RANGE - 149) of its largest weight. Two passes over the weights are saved.

    queries: [L, G, N, D], keys: [L, T, D], values: [L, T, E], scale: of logits in powers of two.
    """
    blocks = range(0, queries.shape[2], block)
    if not blocks or values.dtype == torch.float16:
        return torch.zeros(len(queries), len(blocks), dtype=torch.bool)
    longest, largest = (_lengths(x).amax(1) for x in (keys, values))
    room = _RANGE - math.log2(keys.shape[1]) - largest.clamp(min=1).log2()
    reach = _lengths(queries).amax(1) * (longest[:, None] * scale)
    return torch.stack([x.amax(1) <= room for x in reach.split(block, 1)], 1).cpu()


def _lengths(x: Tensor) -> Tensor:
    """float32[...]: the lengths of vectors [..., D]."""
    return torch.linalg.vector_norm(x.float(), dim=-1)
