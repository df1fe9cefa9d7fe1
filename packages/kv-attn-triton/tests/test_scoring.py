"""Laws of `landmark_topk` and `window_scores`."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from laws import both, problems

from kv_attn_triton import landmark_topk, window_scores

# Largest error of a probability: float32 products of up to 20 numbers times spreads of up to 4.
PROBABILITY = 2e-5


def landmark_scores(q, landmarks, mask):
    """S_2 of ShadowKV Algorithm 2 in float64, one query head after the other; -inf if masked."""
    batch, query_heads, _, size = q.shape
    heads, n = landmarks.shape[1:3]
    scores = torch.full((batch, heads, n), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for head in range(query_heads):
            h = head // (query_heads // heads)
            open_ = mask[b, h].nonzero().flatten()
            logits = q[b, head].double() @ landmarks[b, h, open_].double().T / math.sqrt(size)
            total = torch.softmax(logits, -1).sum(0)
            scores[b, h, open_] = scores[b, h, open_].maximum(total)
    return scores


def window_reference(q, k, mask):
    """Causal softmax of each query over existing keys, summed: float64[B, Hq, N - W]."""
    batch, query_heads, window, size = q.shape
    heads, n = k.shape[1:3]
    scores = torch.zeros(batch, query_heads, n, dtype=torch.float64)
    for b in range(batch):
        for head in range(query_heads):
            for j in range(window):
                here = n - window + j
                seen = [i for i in range(here + 1) if mask[b, i]]
                if not mask[b, here]:
                    continue
                keys = k[b, head // (query_heads // heads), seen].double()
                s = torch.softmax(keys @ q[b, head, j].double() / math.sqrt(size), 0)
                scores[b, head, seen] += s
    scores[~mask[:, None].expand_as(scores)] = -math.inf
    return scores[..., : n - window]


def random_mask(shape, share, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@both(
    p=problems(),
    count=st.integers(0, 80),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_landmark_topk_takes_the_highest(impl, p, count, share, seed):
    """Ascending, unique, -1 last, open landmarks only, and none left out that scores higher."""
    mask = random_mask(p.k.shape[:3], share, seed)
    keys = p.k.masked_fill(~mask.unsqueeze(-1), torch.nan)
    got = landmark_topk(p.q, keys, count, mask=mask, impl=impl)
    scores = landmark_scores(p.q, p.k, mask)
    assert got.shape == (*p.k.shape[:2], count)
    for b in range(got.shape[0]):
        for h in range(got.shape[1]):
            wanted = min(count, int(mask[b, h].sum()))
            chosen = got[b, h, :wanted]
            assert bool((got[b, h, wanted:] == -1).all()) and bool((chosen >= 0).all())
            assert bool((chosen.diff() > 0).all())
            assert bool(mask[b, h, chosen].all())
            rest = scores[b, h].clone()
            rest[chosen] = -math.inf
            if wanted and len(rest) > wanted:
                assert scores[b, h, chosen].min() >= rest.max() - PROBABILITY


@both(p=problems())
def test_landmark_topk_of_everything_is_everything(impl, p):
    n = p.k.shape[2]
    got = landmark_topk(p.q, p.k, n, impl=impl)
    assert torch.equal(got, torch.arange(n).expand(*p.k.shape[:2], n))


@both(p=problems(), seed=st.integers(0, 99), count=st.integers(1, 5))
def test_landmark_topk_finds_planted_landmarks(impl, p, seed, count):
    """Landmarks along a query of the group outweigh all others, whichever head's query it is."""
    n = p.k.shape[2]
    count = min(count, n)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=rng)[:count].sort().values
    keys = torch.zeros_like(p.k)
    heads = p.k.shape[1]
    direction = p.q.float().view(p.q.shape[0], heads, -1, p.q.shape[3])[:, :, :1]
    direction = direction / direction.norm(dim=-1, keepdim=True)
    keys[:, :, order] = (direction * 40 / p.q.float().norm(dim=-1).amax()).to(keys.dtype)
    q = direction.repeat_interleave(p.group, 1).to(p.q.dtype) * 4
    got = landmark_topk(q, keys, count, impl=impl)
    assert torch.equal(got, order.expand(*p.k.shape[:2], count))


@both(
    p=problems(max_q=6),
    pad=st.integers(0, 10),
    reduce=st.sampled_from(["none", "kv_head", "layer"]),
    strided=st.booleans(),
)
def test_window_scores_equal_the_definition(impl, p, pad, reduce, strided):
    """Left padding of NaN keys included; a row may be shorter than the window."""
    batch, heads, n, size = p.k.shape
    window = min(p.q.shape[2], n)
    q = p.q[:, :, p.q.shape[2] - window :]
    mask = torch.ones(batch, n, dtype=torch.bool)
    mask[0, : min(pad, n)] = False
    keys = p.k.masked_fill(~mask[:, None, :, None], torch.nan)
    if strided:
        keys = torch.cat([keys, keys], 3)[..., :size]
    got = window_scores(q, keys, mask=mask, reduce=reduce, impl=impl)
    wanted = window_reference(q, p.k, mask)
    if reduce == "kv_head":
        wanted = wanted.view(batch, heads, p.group, -1).mean(2)
    elif reduce == "layer":
        wanted = wanted.mean(1, keepdim=True)
    assert got.dtype == torch.float32 and got.shape == wanted.shape
    assert torch.equal(got == -math.inf, wanted == -math.inf)
    finite = wanted > -math.inf
    gap = (got.double() - wanted)[finite].abs()
    assert gap.numel() == 0 or float(gap.max()) <= PROBABILITY * max(1, window)


@both(p=problems(max_q=5))
def test_window_scores_plus_the_window_sum_to_the_queries(impl, p):
    """With far weaker keys inside the window, earlier keys receive one per query."""
    window, n = p.q.shape[2], p.k.shape[2] + p.q.shape[2] + 1
    keys = torch.zeros(*p.k.shape[:2], n, p.k.shape[3], dtype=p.k.dtype)
    keys[:, :, n - window :] = -torch.sign(p.q.float().mean((1, 2)))[:, None, None].to(keys.dtype)
    q = torch.sign(p.q.float().mean((1, 2)))[:, None, None].expand_as(p.q).to(p.q.dtype) * 30
    got = window_scores(q, keys, impl=impl)
    torch.testing.assert_close(got.sum(-1), torch.full(got.shape[:2], float(window)))


def test_window_scores_in_two_passes(monkeypatch):
    """Scores that do not fit the buffer are computed twice, to the same result."""
    from kv_attn_triton.reference import columns

    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 3, 16, generator=rng), torch.randn(1, 2, 90, 16, generator=rng)
    mask = torch.ones(1, 90, dtype=torch.bool)
    monkeypatch.setattr(columns, "TILE", 16)
    monkeypatch.setattr(columns, "SCORES", 0)
    got = window_scores(q, k, impl="reference")
    wanted = window_reference(q, k, mask)
    assert float((got - wanted).abs().max()) <= PROBABILITY
    assert torch.equal(
        landmark_topk(q, k, 7, impl="reference"),
        landmark_scores(q, k, mask.expand(1, 2, 90)).topk(7).indices.sort(-1).values,
    )
