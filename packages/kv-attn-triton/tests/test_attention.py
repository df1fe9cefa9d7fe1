"""Laws of `attention`, for the torch path and the kernel under Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DTYPES, LAYOUTS, agree, both, laws, naive, poison_after, problems, relaid

from kv_attn_triton import attention


@both(p=problems(), causal=st.booleans(), scale=st.sampled_from([None, 0.3]))
def test_equals_the_definition(impl, p, causal, scale):
    kw = {"log_size": p.log_size, "lengths": p.lengths, "causal": causal, "scale": scale}
    agree(attention(p.q, p.k, p.v, impl=impl, **kw), naive(p.q, p.k, p.v, **kw), p.v)


@both(p=problems())
def test_equals_the_definition_without_options(impl, p):
    agree(attention(p.q, p.k, p.v, impl=impl), naive(p.q, p.k, p.v), p.v)


@both(p=problems(), causal=st.booleans())
def test_poison_past_lengths_never_leaks(impl, p, causal):
    kw = {"lengths": p.lengths, "causal": causal}
    clean = attention(p.q, p.k, p.v, impl=impl, log_size=p.log_size, **kw)
    poisoned = [poison_after(x, p.lengths) for x in (p.k, p.v, p.log_size)]
    dirty = attention(p.q, *poisoned[:2], impl=impl, log_size=poisoned[2], **kw)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


@both(p=problems(max_n=20), times=st.integers(1, 4))
def test_log_size_equals_repeating_the_entry(impl, p, times):
    sizes = torch.randint(1, times + 1, p.k.shape[2:3], generator=torch.Generator().manual_seed(0))
    repeat = lambda x: x.repeat_interleave(sizes, 2)  # noqa: E731
    log_size = sizes.float().log().expand(p.k.shape[:3])
    merged = attention(p.q, p.k, p.v, log_size=log_size, impl=impl)
    agree(merged, naive(p.q, repeat(p.k), repeat(p.v)), p.v)


@both(p=problems(), seed=st.integers(0, 99))
def test_order_of_keys_does_not_matter(impl, p, seed):
    order = torch.randperm(p.k.shape[2], generator=torch.Generator().manual_seed(seed))
    shuffled = attention(
        p.q, p.k[:, :, order], p.v[:, :, order], log_size=p.log_size[:, :, order], impl=impl
    )
    agree(shuffled, naive(p.q, p.k, p.v, log_size=p.log_size), p.v)


@both(p=problems())
def test_gqa_equals_repeated_heads(impl, p):
    repeat = lambda x: x.repeat_interleave(p.group, 1)  # noqa: E731
    grouped = attention(p.q, p.k, p.v, log_size=p.log_size, lengths=p.lengths, impl=impl)
    agree(
        grouped,
        naive(
            p.q,
            repeat(p.k),
            repeat(p.v),
            log_size=repeat(p.log_size),
            lengths=repeat(p.lengths),
        ),
        p.v,
    )


@both(p=problems(), seed=st.integers(0, 99))
def test_forbidden_entries_weigh_nothing(impl, p, seed):
    keep = torch.rand(p.log_size.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    log_size = p.log_size.masked_fill(~keep, -math.inf)
    got = attention(p.q, p.k, p.v, log_size=log_size, causal=True, impl=impl)
    agree(got, naive(p.q, p.k, p.v, log_size=log_size, causal=True), p.v)


@both(p=problems(max_q=6))
def test_causal_equals_one_query_at_a_time(impl, p):
    """Query j of Q is a single query over the list cut to length - Q + j + 1."""
    got = attention(p.q, p.k, p.v, lengths=p.lengths, causal=True, impl=impl)
    queries = p.q.shape[2]
    for j in range(queries):
        cut = (p.lengths - queries + j + 1).clamp_min(0).to(torch.int32)
        one = naive(p.q[:, :, j : j + 1], p.k, p.v, lengths=cut)
        agree((got[0][:, :, j : j + 1], got[1][:, :, j : j + 1]), one, p.v)


@both(p=problems(), shift=st.floats(-20, 20))
def test_adding_to_every_log_size_moves_lse_alone(impl, p, shift):
    shift = round(shift)
    plain_ = naive(p.q, p.k, p.v, log_size=p.log_size)
    moved = attention(p.q, p.k, p.v, log_size=p.log_size + shift, impl=impl)
    agree(moved, (plain_[0], plain_[1] + shift), p.v)


@both(p=problems(), layout=st.sampled_from(LAYOUTS))
def test_strided_views_are_read_in_place(impl, p, layout):
    """Slices and halves of larger NaN buffers, and [B, N, H, D] memory, give the same result."""
    k, v = relaid(p.k, p.v, layout)
    q = p.q.transpose(1, 2).contiguous().transpose(1, 2)
    agree(attention(q, k, v, lengths=p.lengths, impl=impl), naive(p.q, k, v, lengths=p.lengths), v)


@both(p=problems(max_n=12, max_q=3))
def test_query_dimension_may_have_any_stride(impl, p):
    q = p.q.transpose(2, 3).contiguous().transpose(2, 3)
    agree(attention(q, p.k, p.v, impl=impl), naive(p.q, p.k, p.v), p.v)


@both(p=problems(max_n=300, max_q=2, dtypes=(torch.float32,)))
def test_many_splits_equal_the_definition(impl, p):
    kw = {"log_size": p.log_size, "lengths": p.lengths}
    agree(attention(p.q, p.k, p.v, impl=impl, **kw), naive(p.q, p.k, p.v, **kw), p.v)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
def test_head_sizes_of_models(impl, dtype, size):
    rng = torch.Generator().manual_seed(size)
    q = torch.randn(1, 4, 8, size, generator=rng).to(dtype)
    k, v = torch.randn(2, 1, 2, 70, size, generator=rng).to(dtype)
    agree(attention(q, k, v, causal=True, impl=impl), naive(q, k, v, causal=True), v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_size", [64, 32])
def test_long_keys_and_row_blocks(dtype, value_size, monkeypatch):
    """The float32 route for keys past the cache, conversion by tiles, rows in several blocks."""
    from kv_attn_triton.reference import attention as module

    monkeypatch.setattr(module, "LONG", 64 * 64)
    monkeypatch.setattr(module, "FEW", 99)
    monkeypatch.setattr(module, "CONVERTED", 2 * 2 * 64 * 48)
    monkeypatch.setattr(module, "SCORES", 2 * 2 * 200 * 3)
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 5, 64, generator=rng).to(dtype)
    k = torch.randn(2, 2, 200, 64, generator=rng).to(dtype)
    v = torch.randn(2, 2, 200, value_size, generator=rng).to(dtype)
    log_size = torch.randn(2, 2, 200, generator=rng)
    for causal in (False, True):
        kw = {"log_size": log_size, "causal": causal}
        agree(attention(q, k, v, impl="reference", **kw), naive(q, k, v, **kw), v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_turn_of_many_queries(dtype):
    """Many queries over a longer list: the result, and no tensor as large as Q x N."""
    rng = torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 150, 16, generator=rng).to(dtype)
    k, v = torch.randn(2, 1, 2, 400, 16, generator=rng).to(dtype)
    log_size = torch.randn(1, 2, 400, generator=rng)
    kw = {"log_size": log_size, "causal": True}
    agree(attention(q, k, v, impl="reference", **kw), naive(q, k, v, **kw), v)


@both(p=problems(max_n=6), axis=st.sampled_from(["batch", "queries"]))
def test_nothing_in_gives_nothing_out(impl, p, axis):
    cut = slice(0, 0)
    if axis == "batch":
        out, lse = attention(p.q[cut], p.k[cut], p.v[cut], lengths=p.lengths[cut], impl=impl)
    else:
        out, lse = attention(p.q[:, :, cut], p.k, p.v, lengths=p.lengths, impl=impl)
    assert out.numel() == 0 and out.shape[3] == p.v.shape[3] and lse.shape == out.shape[:3]


@both(p=problems(max_n=6))
def test_inputs_are_left_as_they_were(impl, p):
    before = [x.clone() for x in (p.q, p.k, p.v, p.log_size, p.lengths)]
    attention(p.q, p.k, p.v, log_size=p.log_size, lengths=p.lengths, causal=True, impl=impl)
    after = (p.q, p.k, p.v, p.log_size, p.lengths)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@laws()
@given(
    p=problems(dtypes=(torch.float32, torch.bfloat16)),
    threads=st.integers(2, 7),
    piece=st.integers(1, 9),
    causal=st.booleans(),
    layout=st.sampled_from([None, *LAYOUTS]),
)
def test_idle_threads_get_pieces_of_the_keys(p, threads, piece, causal, layout):
    """More threads than heads: keys are cut, attended in pieces and merged to the same result."""
    from kv_attn_triton.reference import attention as module

    k, v = (p.k, p.v) if layout is None else relaid(p.k, p.v, layout)
    kw = {"log_size": p.log_size, "lengths": p.lengths, "causal": causal}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.torch, "get_num_threads", lambda: threads)
        patch.setattr(module, "PIECE", piece)
        got = attention(p.q, k, v, impl="reference", **kw)
    agree(got, naive(p.q, p.k, p.v, **kw), p.v)


@pytest.mark.parametrize(
    ("threads", "heads", "n", "pieces"),
    [
        (2, 8, 10_000, 1),
        (8, 8, 10_000, 1),
        (16, 8, 10_000, 2),
        (12, 8, 10_000, 3),
        (2, 1, 10_000, 2),
        (2, 3, 10_000, 2),
        (16, 8, 1_500, 1),
        (1, 1, 10_000, 1),
        (3, 32, 10_000, 1),
    ],
)
def test_pieces_fill_the_threads(threads, heads, n, pieces, monkeypatch):
    from kv_attn_triton.reference import attention as module

    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    k = torch.empty(1, 1, 1, 8).expand(1, heads, n, 8)
    assert module._pieces(torch.ones(1, heads, 4, 8), k, k) == pieces
