"""Random cases shared by the tests, and float64 definitions that never call the package."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

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


def attention(
    queries: Tensor, keys: Tensor, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Probabilities [B, H_q, N, T] in float64; the queries are those of the last N positions.

    Positions where `mask` is False are neither seen nor see anything.
    """
    count, tokens, size = queries.shape[2], keys.shape[2], keys.shape[3]
    keys = keys.double().repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    logits = queries.double() @ keys.mT * (1 / math.sqrt(size) if scale is None else scale)
    seen = torch.ones(count, tokens, dtype=torch.bool).tril(tokens - count)[None]
    if mask is not None:
        seen = seen & mask[:, None] & mask[:, tokens - count :, None]
    weights = torch.where(seen[:, None], logits.exp(), 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def over_heads(scores: Tensor, reduce: str, kv_heads: int) -> Tensor:
    """Per query head, averaged over each group, or over all heads."""
    if reduce == "none":
        return scores
    groups = scores.chunk(kv_heads, 1) if reduce == "kv_head" else [scores]
    return torch.cat([group.mean(1, keepdim=True) for group in groups], 1)


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that torch held at once beyond what it held before, the result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
