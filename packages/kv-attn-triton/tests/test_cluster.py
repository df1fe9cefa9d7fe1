"""Laws of `cluster`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st
from laws import DTYPES, both

from kv_attn_triton import cluster

THETAS = (-0.51, 0.33, 0.51, 0.77, 0.93)


@st.composite
def chunked(draw, max_n=36):
    """Keys whose cosines are far from every theta, and offsets of random chunks.

    Keys are signed unit vectors or sums of two: cosines are multiples of 1/2 or of 1/sqrt(2).
    """
    batch, heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    n, size = draw(st.integers(0, max_n)), draw(st.sampled_from([4, 8, 20]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    pick = lambda: torch.randint(0, 4, (batch, heads, n), generator=rng)  # noqa: E731
    sign = torch.randint(0, 2, (batch, heads, n, 1), generator=rng) * 2 - 1
    keys = torch.eye(size)[pick()] + torch.eye(size)[pick()] * sign
    keys = keys * torch.rand(batch, heads, n, 1, generator=rng).add(0.5)
    cuts = torch.rand(max(n - 1, 0), generator=rng) < draw(st.sampled_from([0.0, 0.1, 0.3, 1.0]))
    inner = (cuts.nonzero().flatten() + 1).tolist()
    offsets = torch.tensor(sorted({0, *inner, n}))
    return keys.to(draw(st.sampled_from(DTYPES))), offsets


def greedy(keys, offsets, theta):
    """First free token is a seed and absorbs every later free one: one token after the other."""
    seeds = torch.full(keys.shape[:3], -1)
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            x = keys[b, h].double()
            for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                for i in range(start, end):
                    if seeds[b, h, i] >= 0:
                        continue
                    seeds[b, h, i] = i
                    for j in range(i + 1, end):
                        length = float(x[i].norm() * x[j].norm())
                        cosine = float(x[i] @ x[j]) / length if length > 0 else 0.0
                        if seeds[b, h, j] < 0 and cosine > theta:
                            seeds[b, h, j] = i
    return seeds


@both(c=chunked(), theta=st.sampled_from(THETAS))
def test_equals_greedy_one_token_at_a_time(impl, c, theta):
    keys, offsets = c
    assert torch.equal(cluster(keys, offsets, theta=theta, impl=impl), greedy(keys, offsets, theta))


@both(c=chunked(), theta=st.floats(1, 3))
def test_theta_of_one_or_more_merges_nothing(impl, c, theta):
    keys, offsets = c
    seeds = cluster(keys, offsets, theta=theta, impl=impl)
    assert torch.equal(seeds, torch.arange(keys.shape[2]).expand_as(seeds))


@both(c=chunked())
def test_theta_below_minus_one_merges_each_chunk(impl, c):
    keys, offsets = c
    seeds = cluster(keys, offsets, theta=-1.5, impl=impl)
    starts = offsets[:-1].repeat_interleave(offsets.diff())
    assert torch.equal(seeds, starts.expand_as(seeds))


@both(c=chunked(), theta=st.sampled_from(THETAS), scale=st.sampled_from([1e-3, 0.5, 64.0]))
def test_length_of_keys_does_not_matter(impl, c, theta, scale):
    keys, offsets = c
    same = cluster(keys * scale, offsets, theta=theta, impl=impl)
    assert torch.equal(same, greedy(keys, offsets, theta))


@both(c=chunked(max_n=20), theta=st.sampled_from(THETAS))
def test_strided_keys(impl, c, theta):
    keys, offsets = c
    wide = torch.full((*keys.shape[:3], 2 * keys.shape[3]), torch.nan, dtype=keys.dtype)
    view = wide[..., : keys.shape[3]].copy_(keys)
    got = cluster(view, offsets, theta=theta, impl=impl)
    assert torch.equal(got, greedy(keys, offsets, theta))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_chain_of_neighbours_is_not_one_cluster(impl):
    """Each key is close to the next only: every second is a seed, whatever the tile."""
    angle = torch.arange(300) * 0.5
    keys = torch.stack([angle.cos(), angle.sin()], -1).view(1, 1, 300, 2)[:, :, :12]
    offsets = torch.tensor([0, 12])
    seeds = cluster(keys, offsets, theta=math.cos(0.75), impl=impl)
    assert seeds.flatten().tolist() == [i // 2 * 2 for i in range(12)]


def test_long_chunks_span_tiles(monkeypatch):
    from kv_attn_triton.reference import cluster as module

    monkeypatch.setattr(module, "TILE", 8)
    monkeypatch.setattr(module, "EARLIER", 16)
    monkeypatch.setattr(module, "PAIRS", 1)
    rng = torch.Generator().manual_seed(3)
    keys = torch.eye(12)[torch.randint(0, 12, (1, 2, 100), generator=rng)]
    keys = keys + torch.eye(12)[torch.randint(0, 12, (1, 2, 100), generator=rng)]
    offsets = torch.tensor([0, 60, 61, 100])
    got = cluster(keys, offsets, theta=0.6, impl="reference")
    assert torch.equal(got, greedy(keys, offsets, 0.6))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_zero_keys_are_like_no_other(impl):
    keys = torch.zeros(1, 1, 4, 8)
    got = cluster(keys, torch.tensor([0, 4]), theta=0.0, impl=impl)
    assert got.flatten().tolist() == [0, 1, 2, 3]
