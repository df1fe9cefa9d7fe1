"""Laws of `lowrank_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import LSE, OUT, agree, both, laws, naive, problems

from kv_attn_triton import lowrank_attention, selected_attention
from kv_attn_triton.reference import lowrank as plain


@dataclass(frozen=True)
class Factored:
    q: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    v: torch.Tensor
    indices: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    log_size: torch.Tensor
    interleaved: bool

    def keys(self):
        """left @ right turned one pair of columns after the other, float64 [B, H, N, D]."""
        k = torch.einsum("bnr,bhrd->bhnd", self.left.double(), self.right.double())
        turned, size = k.clone(), self.cos.shape[2]
        cos, sin = (x.double().expand(k.shape[0], -1, -1)[:, None] for x in (self.cos, self.sin))
        for i in range(size // 2):
            a, b = (2 * i, 2 * i + 1) if self.interleaved else (i, i + size // 2)
            turned[..., a] = k[..., a] * cos[..., a] - k[..., b] * sin[..., a]
            turned[..., b] = k[..., b] * cos[..., b] + k[..., a] * sin[..., b]
        return turned

    def call(self, impl, **kw):
        args = (self.q, self.left, self.right, kw.pop("v", self.v), self.indices)
        return lowrank_attention(
            *args, self.cos, self.sin, interleaved=self.interleaved, impl=impl, **kw
        )


@st.composite
def factored(draw, rank=None):
    p = draw(problems(max_n=40, max_q=3, sizes=(8, 16, 20)))
    batch, heads, n, size = p.k.shape
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rank = draw(st.integers(1, 40)) if rank is None else rank
    left = torch.randn(batch, n, rank, generator=rng).to(p.q.dtype)
    right = (torch.randn(batch, heads, rank, size, generator=rng) / math.sqrt(rank)).to(p.q.dtype)
    turned = draw(st.sampled_from([size, size // 2 // 2 * 2, 0]))
    interleaved = draw(st.booleans())
    rows = draw(st.sampled_from([1, batch]))
    angle = torch.rand(rows, n, turned // 2, generator=rng) * 100
    angle = angle.repeat_interleave(2, 2) if interleaved else torch.cat([angle, angle], 2)
    chosen = torch.rand(batch, heads, n, generator=rng) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    width = int(chosen.sum(-1).max()) + draw(st.integers(0, 2)) if n else 1
    order = torch.where(chosen, torch.arange(n), n).sort(-1).values
    indices = torch.nn.functional.pad(order, (0, 2), value=n)[..., :width]
    indices = indices.masked_fill(indices == n, -1).contiguous()
    table = draw(st.sampled_from([torch.float32, p.q.dtype]))
    return Factored(
        p.q,
        left,
        right,
        p.v,
        indices,
        angle.cos().to(table),
        angle.sin().to(table),
        p.log_size,
        interleaved,
    )


# A key rounded to q's dtype, after the product and after the turn, moves a score by up to
# 2 eps |q| |k| / sqrt(D), and the probabilities and lse by about as much.
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def near(f, got, wanted):
    """out and lse within the movement that the rounding of keys allows."""
    lengths = f.q.double().norm(dim=-1).amax() if f.q.numel() else 0.0
    keys = f.keys().norm(dim=-1)
    keys = keys.amax() if keys.numel() else 0.0
    moved = 2 * ROUNDING[f.q.dtype] * float(lengths * keys) / math.sqrt(f.q.shape[3])
    (out, lse), (wanted_out, wanted_lse) = got, wanted
    assert not out.isnan().any() and out.dtype == f.q.dtype
    largest = float(f.v.double().abs().max()) if f.v.numel() else 0.0
    gap = (out.double() - wanted_out).abs()
    assert gap.numel() == 0 or float(gap.max()) <= (OUT[f.q.dtype] + 2 * moved) * largest
    empty = wanted_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    shift = (lse.double() - wanted_lse)[~empty].abs()
    allowed = moved + LSE[f.q.dtype] * wanted_lse[~empty].abs().clamp_min(1)
    assert bool((shift <= allowed).all())


@both(f=factored(), weighted=st.booleans())
def test_equals_rebuilding_and_turning_every_key(impl, f, weighted):
    log_size = f.log_size if weighted else None
    wanted = naive(f.q, f.keys(), f.v, log_size=log_size, indices=f.indices)
    near(f, f.call(impl, log_size=log_size), wanted)


@laws(2)
@given(f=factored(), rows=st.integers(1, 12), weighted=st.booleans(), gathered=st.booleans())
def test_any_number_of_tokens_at_a_time(f, rows, weighted, gathered):
    log_size = f.log_size if weighted else None
    v = f.v
    if gathered:
        picked = f.indices.clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, v.shape[3])
        v = v.gather(2, picked) if v.shape[2] else v.new_zeros(picked.shape)
    with patch.object(plain, "ROWS", rows):
        got = f.call("reference", v=v, values_gathered=gathered, log_size=log_size)
    near(f, got, naive(f.q, f.keys(), f.v, log_size=log_size, indices=f.indices))


@both(f=factored())
def test_gathered_values_equal_values_in_place(impl, f):
    picked = f.indices.clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, f.v.shape[3])
    values = f.v.gather(2, picked) if f.v.shape[2] else f.v.new_zeros(picked.shape)
    values = values.masked_fill((f.indices < 0).unsqueeze(-1), torch.nan)
    before = values.clone()
    got = f.call(impl, v=values, values_gathered=True)
    whole = f.call(impl)
    assert torch.equal(got[0], whole[0]) and torch.equal(got[1], whole[1])
    assert torch.equal(values.isnan(), before.isnan())


@both(f=factored())
def test_poison_at_unselected_rows_never_leaks(impl, f):
    """Rows of left, the tables, v and log_size that no head selects may hold anything."""
    used = torch.zeros(f.left.shape[:2], dtype=torch.bool)
    for b in range(used.shape[0]):
        used[b, f.indices[b][f.indices[b] >= 0]] = True
    dead = ~used
    dirty = Factored(
        f.q,
        f.left.masked_fill(dead.unsqueeze(-1), torch.nan),
        f.right,
        f.v.masked_fill(dead[:, None, :, None], torch.nan),
        f.indices,
        f.cos.masked_fill(dead.all(0)[None, :, None], torch.nan),
        f.sin.masked_fill(dead.all(0)[None, :, None], torch.nan),
        f.log_size.masked_fill(dead.unsqueeze(1), torch.nan),
        f.interleaved,
    )
    got = dirty.call(impl, log_size=dirty.log_size)
    clean = f.call(impl, log_size=f.log_size)
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])


@both(p=problems(max_n=40, sizes=(8, 16)), seed=st.integers(0, 99))
def test_full_rank_equals_exact_keys(impl, p, seed):
    """Keys as left with the identity as right, and no rotation: plain selected attention."""
    keys = p.k[:, :1]
    heads = p.k.shape[1]
    right = torch.eye(keys.shape[3], dtype=keys.dtype).expand(p.k.shape[0], heads, -1, -1)
    order = torch.randperm(keys.shape[2], generator=torch.Generator().manual_seed(seed))
    indices = order.expand(*p.k.shape[:3]).contiguous()
    table = torch.zeros(1, keys.shape[2], 0)
    got = lowrank_attention(p.q, keys[:, 0], right, p.v, indices, table, table, impl=impl)
    shared = keys.expand(-1, heads, -1, -1)
    agree(got, naive(p.q, shared, p.v), p.v)
    agree(selected_attention(p.q, shared, p.v, indices, impl=impl), naive(p.q, shared, p.v), p.v)


@both(f=factored(), times=st.integers(2, 4))
def test_turning_queries_and_keys_alike_changes_nothing(impl, f, times):
    """One angle for all positions and for the queries: scores of the unturned vectors."""
    size = f.cos.shape[2]
    half = torch.full((1, 1, size // 2), 0.7 * times)
    angle = half.repeat_interleave(2, 2) if f.interleaved else torch.cat([half, half], 2)
    table = angle.expand(1, f.left.shape[1], size)
    q = f.q.double()
    turned = q.clone()
    for i in range(size // 2):
        a, b = (2 * i, 2 * i + 1) if f.interleaved else (i, i + size // 2)
        turned[..., a] = q[..., a] * angle[0, 0, a].cos() - q[..., b] * angle[0, 0, a].sin()
        turned[..., b] = q[..., b] * angle[0, 0, b].cos() + q[..., a] * angle[0, 0, b].sin()
    g = Factored(
        turned.float(),
        f.left.float(),
        f.right.float(),
        f.v.float(),
        f.indices,
        table.cos(),
        table.sin(),
        f.log_size,
        f.interleaved,
    )
    keys = torch.einsum("bnr,bhrd->bhnd", g.left.double(), g.right.double())
    near(g, g.call(impl), naive(f.q.float(), keys, g.v, indices=f.indices))
