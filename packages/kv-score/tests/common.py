"""Random cases shared by the tests, and float64 definitions that never call the package."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**31 - 1)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
head_shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))  # B, H_kv, group


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uniform(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def left_padding(seed: int, batch: int, tokens: int) -> tuple[Tensor, list[int]]:
    """A mask of rows of random lengths, full at the right, and the lengths of the padding."""
    generator = torch.Generator().manual_seed(seed)
    pads = torch.randint(0, tokens + 1, (batch,), generator=generator).tolist()
    return torch.arange(tokens) >= torch.tensor(pads)[:, None], pads


def cuts(seed: int, tokens: int, most: int) -> Tensor:
    """Offsets of at most `most` segments of [0, tokens), some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(0, most, (1,), generator=generator))
    inner = torch.randint(0, tokens + 1, (count,), generator=generator).sort().values
    return torch.cat((torch.tensor([0]), inner, torch.tensor([tokens])))


def attention(queries: Tensor, keys: Tensor, scale: float | None = None) -> Tensor:
    """Probabilities [B, H_q, N, T] in float64; the queries are those of the last N positions."""
    count, tokens, size = queries.shape[2], keys.shape[2], keys.shape[3]
    keys = keys.double().repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    logits = queries.double() @ keys.mT * (1 / math.sqrt(size) if scale is None else scale)
    seen = torch.ones(count, tokens, dtype=torch.bool).tril(tokens - count)
    logits = torch.where(seen, logits, -math.inf)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def over_heads(scores: Tensor, reduce: str, kv_heads: int) -> Tensor:
    """Per query head, averaged over each group, or over all heads."""
    if reduce == "none":
        return scores
    groups = scores.chunk(kv_heads, 1) if reduce == "kv_head" else [scores]
    return torch.cat([group.mean(1, keepdim=True) for group in groups], 1)
