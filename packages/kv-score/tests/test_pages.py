from __future__ import annotations

import math

import pytest
import torch
from common import dtypes, head_shapes, left_padding, normal, seeds, uniform
from hypothesis import given
from hypothesis import strategies as st

from kv_score import bound_scores, page_bounds, page_mask, pages

sizes = st.integers(1, 7)


@given(head_shapes, st.integers(0, 24), sizes, dtypes, seeds)
def test_bounds_equal_the_loop_over_pages(shape, tokens, size, dtype, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3, dtype=dtype)
    lower, upper = page_bounds(keys, size)
    assert lower.dtype == upper.dtype == dtype
    parts = keys.split(size, 2) if tokens else []
    assert lower.shape[2] == upper.shape[2] == len(parts)
    for page, part in enumerate(parts):
        ordered = part.sort(2).values
        assert torch.equal(lower[:, :, page], ordered[:, :, 0])
        assert torch.equal(upper[:, :, page], ordered[:, :, -1])


@given(head_shapes, st.integers(1, 24), sizes, seeds)
def test_bounds_never_read_masked_keys(shape, tokens, size, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3)
    mask = uniform(seed, shape[0], tokens) < 0.5
    poisoned = keys.masked_fill(~mask[:, None, :, None], math.nan)
    lower, upper = page_bounds(poisoned, size, key_mask=mask)
    exists = page_mask(mask, size)
    for row in range(shape[0]):
        for page in range(lower.shape[2]):
            span = slice(page * size, page * size + size)
            real = keys[row, :, span][:, mask[row, span]]
            assert exists[row, page].item() == (real.shape[1] > 0)
            if real.shape[1]:
                assert torch.equal(lower[row, :, page], real.amin(1))
                assert torch.equal(upper[row, :, page], real.amax(1))
            else:
                assert not lower[row, :, page].any() and not upper[row, :, page].any()


@given(head_shapes, st.integers(1, 24), sizes, st.integers(1, 9), seeds)
def test_bounds_do_not_depend_on_the_chunk(shape, tokens, size, chunk, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3)
    mask, _ = left_padding(seed, shape[0], tokens)
    whole = [page_bounds(keys, size), page_bounds(keys, size, key_mask=mask)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_CHUNK", chunk)
        parts = [page_bounds(keys, size), page_bounds(keys, size, key_mask=mask)]
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@given(head_shapes, st.integers(1, 4), st.integers(1, 24), sizes, dtypes, seeds)
def test_bound_is_never_below_the_largest_dot_product(shape, count, tokens, size, dtype, seed):
    batch, kv_heads, group = shape
    queries = normal(seed, batch, kv_heads * group, count, 4, dtype=dtype)
    keys = normal(seed + 1, batch, kv_heads, tokens, 4, dtype=dtype)
    lower, upper = page_bounds(keys, size)
    dots = queries.double() @ keys.double().repeat_interleave(group, 1).mT
    per_head = bound_scores(queries, lower, upper, reduce="none")
    per_group = bound_scores(queries, lower, upper)
    rounding = 1e-5 * (1 + dots.abs().amax())
    for page, part in enumerate(dots.amax(2).split(size, -1)):
        best = part.amax(-1)
        assert (per_head[..., page] >= best - rounding).all()
        best = best.unflatten(1, (kv_heads, group)).amax(2)
        assert (per_group[..., page] >= best - rounding).all()


@given(head_shapes, st.integers(1, 4), st.integers(1, 24), sizes, st.booleans(), seeds)
def test_bound_of_whole_numbers_is_never_below_at_all(shape, count, tokens, size, masked, seed):
    """Products and sums of small whole numbers are exact: no rounding to allow for."""
    batch, kv_heads, group = shape
    queries = (4 * normal(seed, batch, kv_heads * group, count, 4)).round()
    keys = (4 * normal(seed + 1, batch, kv_heads, tokens, 4)).round()
    mask = uniform(seed, batch, tokens) < (0.6 if masked else 2)
    poisoned = keys.masked_fill(~mask[:, None, :, None], math.nan)
    lower, upper = page_bounds(poisoned, size, key_mask=mask)
    bound = bound_scores(queries, lower, upper, reduce="none", mask=page_mask(mask, size))
    dots = queries.double() @ keys.double().repeat_interleave(group, 1).mT
    best = dots.amax(2).masked_fill(~mask[:, None], -math.inf)
    for page, part in enumerate(best.split(size, -1)):
        assert (bound[..., page] >= part.amax(-1)).all()
        one = part.isfinite().sum(-1) == 1  # a page of one key reaches its bound with one query
        if count == 1:
            assert torch.equal(bound[..., page][one].double(), part.amax(-1)[one])


@given(head_shapes, st.integers(1, 6), sizes, seeds)
def test_queries_that_do_not_exist_bound_nothing(shape, count, total, seed):
    batch, kv_heads, group = shape
    queries = normal(seed, batch, kv_heads * group, count, 4)
    lower = normal(seed + 1, batch, kv_heads, total, 4)
    upper = lower + uniform(seed, batch, kv_heads, total, 4)
    exists, pads = left_padding(seed, batch, count)
    poisoned = queries.masked_fill(~exists[:, None, :, None], math.nan)
    for reduce in ("none", "kv_head"):
        got = bound_scores(poisoned, lower, upper, reduce=reduce, query_mask=exists)
        for row, pad in enumerate(pads):
            if pad == count:
                assert (got[row] == -math.inf).all()
                continue
            alone = slice(row, row + 1)
            single = bound_scores(
                queries[alone, :, pad:], lower[alone], upper[alone], reduce=reduce
            )
            torch.testing.assert_close(got[alone], single)


@given(head_shapes, st.integers(1, 4), st.integers(1, 6), seeds)
def test_bound_equals_the_loop_over_channels(shape, count, total, seed):
    batch, kv_heads, group = shape
    queries = normal(seed, batch, kv_heads * group, count, 4)
    one = normal(seed + 1, batch, kv_heads, total, 4)
    two = normal(seed + 2, batch, kv_heads, total, 4)
    lower, upper = torch.minimum(one, two), torch.maximum(one, two)
    exists = uniform(seed, batch, total) < 0.7
    got = bound_scores(queries, lower, upper, reduce="none", mask=exists)
    wanted = torch.zeros(count, batch, kv_heads * group, total, dtype=torch.float64)
    for channel in range(4):
        q = queries[..., channel].double().permute(2, 0, 1)[..., None]
        low = lower[..., channel].double().repeat_interleave(group, 1)
        high = upper[..., channel].double().repeat_interleave(group, 1)
        wanted += torch.maximum(q * low, q * high)
    wanted = wanted.amax(0).masked_fill(~exists[:, None], -math.inf)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    grouped = bound_scores(queries, lower, upper, mask=exists)
    assert torch.equal(grouped, got.unflatten(1, (kv_heads, group)).amax(2))


K = torch.zeros(2, 2, 5, 8)


@pytest.mark.parametrize(
    ("keys", "size", "mask", "error", "text"),
    [
        (K[0], 2, None, ValueError, "keys must have 4 dimensions"),
        (K, 0, None, ValueError, "size must be at least 1, got 0"),
        (K, True, None, TypeError, "size must be an int, got True"),
        (K.int(), 2, None, TypeError, "keys must be of a floating dtype, got torch.int32"),
        (
            K,
            2,
            torch.ones(2, 5, dtype=torch.bool, device="meta"),
            ValueError,
            "key_mask must be on cpu like the other tensors, got meta",
        ),
        (K, 2, torch.ones(2, 5), TypeError, "key_mask must be of dtype torch.bool"),
    ],
)
def test_errors_of_page_bounds(plain, keys, size, mask, error, text):
    with pytest.raises(error, match=text):
        page_bounds(keys, size, key_mask=mask)


@pytest.mark.parametrize(
    ("queries", "lower", "upper", "options", "error", "text"),
    [
        (K, K[:, :, :2], K[:, :, :3], {}, ValueError, r"upper must have shape \(2, 2, 2, 8\), got"),
        (K[:, :, :0], K, K, {}, ValueError, "queries must hold at least one query"),
        (K, K, K, {"reduce": "layer"}, ValueError, "reduce must be one of none, kv_head, got 'la"),
        (K[..., :4], K, K, {}, ValueError, "queries and lower must agree"),
        (K, K, K, {"mask": torch.ones(2, 5)}, TypeError, "mask must be of dtype torch.bool"),
        (
            K,
            K,
            K,
            {"query_mask": K[:, 0, :4, 0] > 0},
            ValueError,
            r"query_mask must have .*\(2, 5\)",
        ),
        (K, K.to("meta"), K, {}, ValueError, "lower must be on cpu like the other .*, got meta"),
        (K, K, K.to("meta"), {}, ValueError, "upper must be on cpu like the other .*, got meta"),
        (K, K.int(), K, {}, TypeError, "lower must be of a floating dtype, got torch.int32"),
    ],
)
def test_errors_of_bound_scores(plain, queries, lower, upper, options, error, text):
    with pytest.raises(error, match=text):
        bound_scores(queries, lower, upper, **options)


def test_errors_of_page_mask(plain):
    with pytest.raises(TypeError, match="key_mask must be of dtype"):
        page_mask(torch.ones(2, 5), 2)
    with pytest.raises(ValueError, match="size must be at least 1, got -1"):
        page_mask(torch.ones(2, 5, dtype=torch.bool), -1)
