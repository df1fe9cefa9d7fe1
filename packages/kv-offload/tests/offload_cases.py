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


def random_indices(lengths, heads, count, ordered, seed) -> torch.Tensor:
    """int64 [B, heads, count] in [-1, lengths[b]): any order with repeats, or as selections are."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((len(lengths), heads, count), -1)
    for b, length in enumerate(lengths):
        if not ordered:
            indices[b] = torch.randint(-1, length, (heads, count), generator=generator)
            continue
        for h in range(heads):
            valid = int(torch.randint(0, min(count, length) + 1, (), generator=generator))
            chosen = torch.randperm(length, generator=generator)[:valid].sort().values
            indices[b, h, :valid] = chosen
    return indices


@st.composite
def index_tensors(draw, batch, heads, length, *, most=8, ordered=None):
    """int64 [batch, heads, K] in [-1, length)."""
    ordered = ordered if ordered is not None else draw(st.booleans())
    count = draw(st.integers(0, most))
    return random_indices([length] * batch, heads, count, ordered, draw(seeds))


@st.composite
def ragged_indices(draw, rows, *, most=8):
    """int64 [B, H, K] for `rows`, a list of [H, N_b, D]: each batch row in its own range."""
    lengths = [row.shape[1] for row in rows]
    count, ordered = draw(st.integers(0, most)), draw(st.booleans())
    return random_indices(lengths, rows[0].shape[0], count, ordered, draw(seeds))


@st.composite
def ragged_rows(draw, *, most=9):
    """A list of [H, N_b, D] of unequal length, empty ones among them."""
    heads, width = draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 3, 8]))
    lengths = draw(st.lists(st.integers(0, most), min_size=1, max_size=4))
    dtype, seed = draw(dtypes), draw(seeds)
    return [
        random_rows((heads, length, width), dtype, seed + b) for b, length in enumerate(lengths)
    ]


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
    """out[b, h, k] = rows[b][h, indices[b, h, k]], one by one; where -1, `start` or zero."""
    shape = (*indices.shape, rows[0].shape[-1] if len(rows) else rows.shape[3])
    dtype = rows[0].dtype if len(rows) else rows.dtype
    out = torch.zeros(shape, dtype=dtype) if start is None else start.clone()
    for b in range(indices.shape[0]):
        for h in range(indices.shape[1]):
            for k, index in enumerate(indices[b, h].tolist()):
                if index >= 0:
                    out[b, h, k] = rows[b][h, index]
    return out


def same_bits(a, b) -> bool:
    """Equal in shape, dtype and every bit, NaNs and signs of zeros included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.cpu().clone(memory_format=torch.contiguous_format) for x in (a, b))
    a, b = (x.as_strided((x.numel(),), (1,)).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)
