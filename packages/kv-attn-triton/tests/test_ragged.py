"""Lists of unequal length that lie one after the other, or anywhere."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import strategies as st
from laws import agree, both, naive, plain, problems

import kv_attn_triton as kv


@both(p=problems(max_n=100), seed=st.integers(0, 99), weighted=st.booleans())
def test_ragged_lists_equal_the_definition(impl, p, seed, weighted):
    """Lists anywhere in one long one, overlapping or empty, NaN where no list reaches."""
    batch, heads, n = p.k.shape[:3]
    rng = torch.Generator().manual_seed(seed)
    k, v, log_size = p.k[0, 0], p.v[0, 0], p.log_size[0, 0]
    starts = torch.randint(0, n + 1, (batch, heads), generator=rng)
    lengths = (torch.rand(batch, heads, generator=rng) * (n - starts + 1)).to(torch.int32)
    lengths = lengths.minimum((n - starts).to(torch.int32))
    wide = lambda x: x.expand(batch, heads, *x.shape)  # noqa: E731
    indices = torch.full((batch, heads, n), -1)
    used = torch.zeros(n, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            listed = torch.arange(int(starts[b, h]), int(starts[b, h] + lengths[b, h]))
            indices[b, h, : len(listed)] = listed
            used[listed] = True
    size = log_size if weighted else None
    wanted = naive(
        p.q, wide(k), wide(v), indices=indices, log_size=None if size is None else wide(size)
    )
    dirty = [x.masked_fill(~used.unsqueeze(1), torch.nan) for x in (k, v)]
    size = None if size is None else size.masked_fill(~used, torch.nan)
    got = kv.ragged_attention(p.q, *dirty, starts, lengths, log_size=size, impl=impl)
    agree(got, wanted, v)


@both(p=problems(max_n=40), seed=st.integers(0, 99))
def test_packed_lists_equal_padded_ones(impl, p, seed):
    """Each row's heads one after the other, as a compressed cache holds them."""
    batch, heads, n = p.k.shape[:3]
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, n + 1, (batch, heads), generator=rng).to(torch.int32)
    ends = lengths.flatten().cumsum(0)
    starts = (ends - lengths.flatten()).view(batch, heads).long()
    live = torch.arange(n) < lengths[..., None]
    got = kv.ragged_attention(p.q, p.k[live], p.v[live], starts, lengths, impl=impl)
    agree(got, naive(p.q, p.k, p.v, lengths=lengths), p.v)


Q, K = torch.ones(2, 4, 1, 8), torch.ones(9, 8)
STARTS, LENGTHS = torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 2), 9, dtype=torch.int32)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"q": Q[0]}, ValueError, "q must have 4 dimensions"),
        ({"q": Q[:, :3]}, ValueError, "q must have a multiple of the 2 KV heads"),
        ({"q": Q.double()}, TypeError, "q must be float32"),
        ({"k": K[None]}, ValueError, "k must have 2 dimensions"),
        ({"k": K[:, :4]}, ValueError, "k must have q's head size, at least 1; got 4 for q's 8"),
        ({"k": K.half()}, TypeError, "k must have q's dtype"),
        ({"k": K.to("meta")}, ValueError, "k must be on q's device cpu"),
        ({"v": K[:4]}, ValueError, "v must have shape [9, Dv >= 1], got (4, 8)"),
        ({"starts": STARTS.int()}, TypeError, "starts must be torch.int64, got torch.int32"),
        ({"lengths": LENGTHS.long()}, TypeError, "lengths must be torch.int32"),
        ({"lengths": LENGTHS[:, :1]}, ValueError, "lengths must have shape [2, 2], got [2, 1]"),
        ({"starts": STARTS[:1]}, ValueError, "starts must have shape [2, 2], got [1, 2]"),
        ({"starts": STARTS - 1}, ValueError, "starts must be at least 0, got -1"),
        ({"lengths": -LENGTHS}, ValueError, "lengths must be at least 0, got -9"),
        ({"starts": STARTS + 1}, ValueError, "starts + lengths must be at most the 9 entries"),
        ({"log_size": torch.zeros(8)}, ValueError, "log_size must have shape [9], got [8]"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ],
)
def test_wrong_lists_are_refused(impl, changed, error, text):
    given = {"q": Q, "k": K, "v": K, "starts": STARTS, "lengths": LENGTHS} | changed
    with pytest.raises(error, match=re.escape(text)):
        plain(kv.ragged_attention)(**given, impl=impl)
