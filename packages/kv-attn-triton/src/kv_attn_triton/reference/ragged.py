"""Attention over lists of unequal length that lie one after the other, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .attention import State, attention


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    log_size: Tensor | None,
    scale: float,
) -> State:
    """See `kv_attn_triton.ragged_attention`. One call per run of equal, adjoining lists."""
    batch, query_heads, queries, _ = q.shape
    group = query_heads // starts.shape[1]
    out = q.new_empty(batch, query_heads, queries, v.shape[1])
    lse = q.new_empty(batch, query_heads, queries, dtype=torch.float32)
    for row, (begin, count) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for first, last in _runs(begin, count):
            here = (slice(row, row + 1), slice(first * group, last * group))
            shape = (1, last - first, count[first])
            part = slice(begin[first], begin[first] + count[first] * (last - first))
            out[here], lse[here] = attention(
                q[here],
                k[part].view(*shape, k.shape[1]),
                v[part].view(*shape, v.shape[1]),
                None if log_size is None else log_size[part].view(shape),
                None,
                False,
                scale,
            )
    return out, lse


def _runs(begin: Sequence[int], count: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Heads [first, last) whose lists have one length and follow each other without a gap."""
    first = 0
    for head in range(1, len(begin) + 1):
        if (
            head == len(begin)
            or count[head] != count[first]
            or begin[head] != begin[head - 1] + count[first]
        ):
            yield first, head
            first = head
