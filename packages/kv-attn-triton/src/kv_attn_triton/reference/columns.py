"""What keys receive: softmax over keys, summed over queries, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import SCORES, folds, pack, products

TILE = 2048  # keys scored at a time
FULL = torch.finfo(torch.float32).max


def column_sums(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool, end: int
) -> Tensor:
    """sum_j softmax_n(scale q_j.k_n) -> float32[B, H_kv, G, end] for the first `end` keys.

    mask: bool[B, H_kv, N], False keys weigh nothing. causal: the queries are the last keys; a
    query whose own key is masked counts for nothing. Keys are read a tile at a time, twice when
    the scores do not fit in a fixed buffer.
    """
    batch, query_heads, queries, _ = q.shape
    heads, n = k.shape[1], k.shape[2]
    if q.numel() == 0 or end == 0:
        return q.new_zeros(batch, heads, query_heads // heads, end, dtype=torch.float32)
    rows = pack(q, heads).float() * scale
    own = n - queries + torch.arange(queries, device=q.device).repeat(query_heads // heads)

    def scores(start: int) -> Tensor:
        stop = min(start + TILE, n)
        x = products(rows, k[:, :, start:stop]).contiguous()
        if mask is not None:
            x.masked_fill_(~mask[:, :, None, start:stop], -torch.inf)
        if causal and stop > n - queries:
            x.masked_fill_(torch.arange(start, stop, device=q.device) > own[:, None], -torch.inf)
        return x

    starts = range(0, n, TILE)
    kept = batch * heads * rows.shape[2] * n <= SCORES
    tiles = [scores(i) for i in starts] if kept else None
    parts = [(scores(i) if tiles is None else tiles[i // TILE]).logsumexp(-1) for i in starts]
    lse = torch.stack(parts).logsumexp(0)
    lse = silence(lse, mask, own if causal else None).unsqueeze(-1)
    received = [
        (scores(i) if tiles is None else tiles[i // TILE])
        .sub_(lse)
        .exp_()
        .view(batch, heads, -1, queries, min(TILE, n - i))
        .sum(3)
        for i in starts
        if i < end
    ]
    return torch.cat(received, -1)[..., :end]


def highest_shares(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """max over the group of `column_sums`, or for one query of its logarithm: [B, H_kv, N].

    The order is the same, and one query of each head needs no exponential beyond the softmax's.
    Scores of masked keys mean nothing.
    """
    batch, query_heads, queries, _ = q.shape
    heads, n = k.shape[1], k.shape[2]
    if queries != 1 or n == 0 or batch * query_heads * n > SCORES or copies(k):
        return column_sums(q, k, mask, scale, False, n).amax(2)
    x = products(pack(q, heads).float() * scale, k).contiguous()
    if mask is not None:
        x.masked_fill_(~mask.unsqueeze(2), -torch.inf)
    return x.log_softmax(-1).amax(2)


def copies(k: Tensor) -> bool:
    """Whether a product copies all keys: float32 whose batch and heads are not one run."""
    return k.dtype == torch.float32 and not folds(k)


def silence(lse: Tensor, mask: Tensor | None, own: Tensor | None) -> Tensor:
    """lse [B, H, R], made so large that exp(s - lse) is 0 in rows that count for nothing."""
    if mask is not None and own is not None:
        lse = lse.masked_fill(~mask[:, :, own], FULL)
    return lse.masked_fill(lse == -torch.inf, FULL)


def pick(scores: Tensor, count: int) -> Tensor:
    """The `count` highest of scores [B, H, N] above -inf: ascending indices, -1 last."""
    n = scores.shape[2]
    best, indices = scores.topk(min(count, n), dim=-1, sorted=False)
    indices = indices.masked_fill_(best == -torch.inf, n).sort(-1).values
    indices.masked_fill_(indices == n, -1)
    if count <= n:
        return indices
    return torch.nn.functional.pad(indices, (0, count - n), value=-1)
