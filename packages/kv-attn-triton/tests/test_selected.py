"""Laws of `selected_attention` and of merging parts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import LAYOUTS, agree, both, laws, naive, problems, relaid

from kv_attn_triton import attention, merge_states, selected_attention


@st.composite
def selections(draw, **kw):
    """A problem and, per head, ascending unique indices of it, -1 last."""
    p = draw(problems(**kw))
    batch, heads, n = p.k.shape[:3]
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    chosen = torch.rand(batch, heads, n, generator=rng) < share
    width = int(chosen.sum(-1).max()) + draw(st.integers(0, 3)) if n else 2
    indices = torch.full((batch, heads, width), -1)
    for b in range(batch):
        for h in range(heads):
            picked = chosen[b, h].nonzero().flatten()
            indices[b, h, : len(picked)] = picked
    return p, indices


def poison_unselected(x, indices):
    x = x.clone()
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            keep = indices[b, h][indices[b, h] >= 0]
            dead = torch.ones(x.shape[2], dtype=torch.bool)
            dead[keep] = False
            x[b, h, dead] = torch.nan
    return x


@both(s=selections(), weighted=st.booleans())
def test_equals_the_definition(impl, s, weighted):
    p, indices = s
    log_size = p.log_size if weighted else None
    got = selected_attention(p.q, p.k, p.v, indices, log_size=log_size, impl=impl)
    agree(got, naive(p.q, p.k, p.v, log_size=log_size, indices=indices), p.v)


@both(s=selections())
def test_poison_at_unselected_entries_never_leaks(impl, s):
    p, indices = s
    dirty = [poison_unselected(x, indices) for x in (p.k, p.v, p.log_size)]
    got = selected_attention(p.q, *dirty[:2], indices, log_size=dirty[2], impl=impl)
    agree(got, naive(p.q, p.k, p.v, log_size=p.log_size, indices=indices), p.v)


@both(p=problems(), seed=st.integers(0, 99))
def test_all_indices_equal_attention_in_any_order(impl, p, seed):
    batch, heads, n = p.k.shape[:3]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    indices = order.expand(batch, heads, n).contiguous()
    got = selected_attention(p.q, p.k, p.v, indices, log_size=p.log_size, impl=impl)
    agree(got, naive(p.q, p.k, p.v, log_size=p.log_size), p.v)


@both(p=problems(max_n=20), width=st.integers(0, 3))
def test_empty_selection_is_neutral(impl, p, width):
    indices = torch.full((*p.k.shape[:2], width), -1)
    poison = torch.full_like(p.k, torch.nan), torch.full_like(p.v, torch.nan)
    out, lse = selected_attention(p.q, *poison, indices, impl=impl)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())
    whole = attention(p.q, p.k, p.v, impl=impl)
    merged = merge_states([(out, lse), whole, (out, lse)])
    assert torch.equal(merged[0], whole[0]) and torch.equal(merged[1], whole[1])


@both(s=selections(max_n=20), holes=st.integers(1, 3))
def test_padding_may_stand_anywhere(impl, s, holes):
    p, indices = s
    pad = torch.full((*indices.shape[:2], holes), -1)
    spread = torch.cat([pad, indices, pad, indices[..., :0]], -1)
    got = selected_attention(p.q, p.k, p.v, spread, impl=impl)
    agree(got, naive(p.q, p.k, p.v, indices=indices), p.v)


@both(s=selections(max_n=20), layout=st.sampled_from(LAYOUTS))
def test_strided_caches_are_read_in_place(impl, s, layout):
    p, indices = s
    k, v = relaid(p.k, p.v, layout)
    got = selected_attention(p.q, k, v, indices, impl=impl)
    agree(got, naive(p.q, p.k, p.v, indices=indices), p.v)


@both(p=problems(), pieces=st.integers(1, 4), seed=st.integers(0, 99))
def test_merging_any_split_equals_the_whole(impl, p, pieces, seed):
    """Entries dealt to pieces at random, one selection per piece, merged."""
    n = p.k.shape[2]
    owner = torch.randint(0, pieces, (n,), generator=torch.Generator().manual_seed(seed))
    parts = []
    for piece in range(pieces):
        indices = (owner == piece).nonzero().flatten().expand(*p.k.shape[:2], -1).contiguous()
        parts.append(selected_attention(p.q, p.k, p.v, indices, log_size=p.log_size, impl=impl))
    agree(merge_states(parts), naive(p.q, p.k, p.v, log_size=p.log_size), p.v)


@laws()
@given(p=problems(), seed=st.integers(0, 99))
def test_merge_order_does_not_matter(p, seed):
    cuts = [0, p.k.shape[2] // 3, p.k.shape[2] // 2, p.k.shape[2]]
    parts = [naive(p.q, p.k[:, :, a:b], p.v[:, :, a:b]) for a, b in pairwise(cuts)]
    parts = [(out.to(p.q.dtype), lse.float()) for out, lse in parts]
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))
    agree(merge_states([parts[i] for i in order]), naive(p.q, p.k, p.v), p.v)


def test_merge_of_all_empty_is_empty():
    part = torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), -math.inf)
    out, lse = merge_states([part, part, part])
    assert torch.equal(out, part[0]) and torch.equal(lse, part[1])


def test_merge_far_apart_and_large():
    """exp would overflow or vanish: the heavier part is the result."""
    heavy = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 300.0)
    light = torch.full((1, 1, 1, 2), 7.0), torch.full((1, 1, 1), -300.0)
    out, lse = merge_states([light, heavy])
    assert torch.equal(out, heavy[0]) and torch.equal(lse, heavy[1])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_repeated_index_counts_twice(impl):
    q, k = torch.ones(1, 1, 1, 8), torch.zeros(1, 1, 3, 8)
    v = torch.eye(3).view(1, 1, 3, 3)
    out, lse = selected_attention(q, k, v, torch.tensor([[[0, 0, 2]]]), impl=impl)
    torch.testing.assert_close(out.flatten(), torch.tensor([2 / 3, 0, 1 / 3]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([3.0]).log())
