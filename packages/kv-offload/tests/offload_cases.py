"""Random rows and indices, and slow references that never call the package."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.bool,
]
TIERS = ["device", "host", "disk"]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

dtypes = st.sampled_from(DTYPES)
tiers = st.sampled_from(TIERS)
devices = st.sampled_from(DEVICES)
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(
    st.integers(0, 3), st.integers(0, 3), st.integers(0, 9), st.sampled_from([0, 1, 2, 3, 8])
)


def random_rows(shape, dtype, seed) -> torch.Tensor:
    """Every bit pattern of `dtype` is possible: NaN payloads, infinities, -0."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.int64)
    return raw.to(torch.uint8).view(dtype).view(shape)


@st.composite
def index_tensors(draw, batch, heads, length, *, most=8, ordered=None):
    """int64 [batch, heads, K] in [-1, length): any order with repeats, or as selections are."""
    seed = draw(seeds)
    generator = torch.Generator().manual_seed(seed)
    count = draw(st.integers(0, most))
    if ordered if ordered is not None else draw(st.booleans()):
        indices = torch.full((batch, heads, count), -1)
        for b in range(batch):
            for h in range(heads):
                valid = min(count, length)
                valid = int(torch.randint(0, valid + 1, (), generator=generator))
                chosen = torch.randperm(length, generator=generator)[:valid].sort().values
                indices[b, h, :valid] = chosen
        return indices
    return torch.randint(-1, length, (batch, heads, count), generator=generator)


@st.composite
def cases(draw, *, ordered=None):
    """(rows, indices, tier, device) with ragged, empty and degenerate ones among them."""
    shape = draw(shapes)
    rows = random_rows(shape, draw(dtypes), draw(seeds))
    indices = draw(index_tensors(*shape[:3], ordered=ordered))
    return rows, indices, draw(tiers), draw(devices)


@st.composite
def batch_orders(draw, batch, sizes):
    """int64 [B2] in [0, batch)."""
    size = draw(sizes) if batch else 0
    order = draw(st.lists(st.integers(0, max(batch - 1, 0)), min_size=size, max_size=size))
    return torch.tensor(order, dtype=torch.int64)


def indexed(rows, indices, start=None) -> torch.Tensor:
    """out[b, h, k] = rows[b, h, indices[b, h, k]], one by one; where -1, `start` or zero."""
    shape = (*indices.shape, rows.shape[3])
    out = torch.zeros(shape, dtype=rows.dtype) if start is None else start.clone()
    for b in range(indices.shape[0]):
        for h in range(indices.shape[1]):
            for k, index in enumerate(indices[b, h].tolist()):
                if index >= 0:
                    out[b, h, k] = rows[b, h, index]
    return out


def same_bits(a, b) -> bool:
    """Equal in shape, dtype and every bit, NaNs and signs of zeros included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.cpu().clone(memory_format=torch.contiguous_format) for x in (a, b))
    a, b = (x.as_strided((x.numel(),), (1,)).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)
