from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from common import (
    attention,
    dtypes,
    head_shapes,
    left_padding,
    normal,
    over_heads,
    peak_bytes,
    seeds,
    uniform,
)
from hypothesis import given
from hypothesis import strategies as st

from kv_score import accumulated_attention, window_attention

reductions = st.sampled_from(["none", "kv_head", "layer"])


def case(shape, tokens, window, seed, dtype=torch.float32, size=4):
    batch, kv_heads, group = shape
    window = min(window, tokens)
    queries = normal(seed, batch, kv_heads * group, window, size, dtype=dtype) * 2
    keys = normal(seed + 1, batch, kv_heads, tokens, size, dtype=dtype) * 2
    return queries, keys


@given(head_shapes, st.integers(1, 24), st.integers(0, 8), reductions, dtypes, seeds)
def test_window_scores_equal_the_written_out_softmax(shape, tokens, window, reduce, dtype, seed):
    queries, keys = case(shape, tokens, window, seed, dtype)
    scores = window_attention(queries, keys, reduce=reduce, chunk=5)
    end = tokens - queries.shape[2]
    wanted = over_heads(attention(queries, keys).sum(2)[..., :end], reduce, shape[1])
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), wanted, atol=1e-5, rtol=1e-5)


@given(head_shapes, st.integers(1, 24), st.integers(1, 8), st.integers(1, 30), seeds)
def test_chunk_size_does_not_matter(shape, tokens, window, chunk, seed):
    queries, keys = case(shape, tokens, window, seed)
    whole = window_attention(queries, keys, chunk=4096)
    torch.testing.assert_close(
        window_attention(queries, keys, chunk=chunk), whole, atol=1e-6, rtol=1e-5
    )


@given(head_shapes, st.integers(1, 24), st.integers(1, 8), st.integers(1, 9), seeds)
def test_each_query_gives_away_exactly_one(shape, tokens, window, chunk, seed):
    queries, keys = case(shape, tokens, window, seed)
    mask = uniform(seed, shape[0], tokens) < 0.7
    for place in range(queries.shape[2]):
        seen = tokens - queries.shape[2] + place + 1
        query, part, exists = queries[:, :, place, None], keys[:, :, :seen], mask[:, :seen]
        row = accumulated_attention(query, part, chunk=chunk)
        assert (row >= 0).all()
        torch.testing.assert_close(row.sum(-1), torch.ones(row.shape[:2]))
        row = accumulated_attention(query, part, key_mask=exists, chunk=chunk)
        total = row.masked_fill(~exists[:, None], 0.0).sum(-1)
        torch.testing.assert_close(total, exists[:, -1:].float().expand_as(total))


@given(head_shapes, st.integers(1, 24), st.integers(0, 8), reductions, dtypes, seeds)
def test_masked_scores_equal_the_written_out_softmax(shape, tokens, window, reduce, dtype, seed):
    queries, keys = case(shape, tokens, window, seed, dtype)
    count = queries.shape[2]
    mask = uniform(seed, shape[0], tokens) < 0.6
    probabilities = attention(queries, keys, mask=mask)
    wanted = over_heads(probabilities.sum(2), reduce, shape[1])
    wanted = wanted.masked_fill(~mask[:, None], -math.inf)
    keys = keys.masked_fill(~mask[:, None, :, None], math.nan)
    queries = queries.masked_fill(~mask[:, None, tokens - count :, None], math.nan)
    options = {"key_mask": mask, "reduce": reduce, "chunk": 5}
    whole = accumulated_attention(queries, keys, query_chunk=3, **options)
    torch.testing.assert_close(whole.double(), wanted, atol=1e-5, rtol=1e-5)
    part = window_attention(queries, keys, **options)
    torch.testing.assert_close(part.double(), wanted[..., : tokens - count], atol=1e-5, rtol=1e-5)


@given(head_shapes, st.integers(2, 20), st.integers(1, 8), reductions, seeds)
def test_window_is_the_first_part_of_the_accumulated(shape, tokens, window, reduce, seed):
    queries, keys = case(shape, tokens, window, seed)
    whole = accumulated_attention(queries, keys, reduce=reduce, chunk=7, query_chunk=2)
    part = window_attention(queries, keys, reduce=reduce)
    torch.testing.assert_close(part, whole[..., : part.shape[-1]], atol=1e-5, rtol=1e-5)


@given(head_shapes, st.integers(1, 16), st.integers(1, 9), st.integers(1, 9), reductions, seeds)
def test_accumulated_equals_the_column_sums_of_the_full_matrix(
    shape, tokens, chunk, query_chunk, reduce, seed
):
    queries, keys = case(shape, tokens, tokens, seed)
    scores = accumulated_attention(
        queries, keys, reduce=reduce, chunk=chunk, query_chunk=query_chunk
    )
    wanted = over_heads(attention(queries, keys).sum(2), reduce, shape[1])
    torch.testing.assert_close(scores.double(), wanted, atol=1e-5, rtol=1e-5)


@given(head_shapes, st.integers(1, 20), st.integers(1, 8), reductions, st.booleans(), seeds)
def test_a_padded_row_equals_that_row_alone(shape, tokens, window, reduce, whole, seed):
    queries, keys = case(shape, tokens, tokens if whole else window, seed)
    window = queries.shape[2]
    mask, pads = left_padding(seed, shape[0], tokens)
    keys.masked_fill_(~mask[:, None, :, None], math.nan)
    queries.masked_fill_(~mask[:, None, tokens - window :, None], math.nan)
    score = accumulated_attention if whole else window_attention
    batched = score(queries, keys, key_mask=mask, reduce=reduce, chunk=6)
    for row, pad in enumerate(pads):
        alone = queries[row : row + 1, :, max(0, pad - tokens + window) :]
        single = score(alone, keys[row : row + 1, :, pad:], reduce=reduce)[0]
        visible = batched.shape[-1] - single.shape[-1]
        assert (batched[row, :, :visible] == -math.inf).all()
        torch.testing.assert_close(batched[row, :, visible:], single, atol=1e-6, rtol=1e-5)


@given(head_shapes, st.integers(2, 20), st.integers(1, 6), seeds)
def test_masked_keys_anywhere_are_never_read(shape, tokens, window, seed):
    queries, keys = case(shape, tokens, window, seed)
    end = tokens - queries.shape[2]
    mask = torch.rand(shape[0], tokens, generator=torch.Generator().manual_seed(seed)) > 0.5
    mask[:, end:] = True
    clean = window_attention(queries, keys, key_mask=mask)
    poisoned = keys.masked_fill(~mask[:, None, :, None], math.nan)
    assert torch.equal(window_attention(queries, poisoned, key_mask=mask), clean)
    assert torch.equal(clean == -math.inf, (~mask[:, None, :end]).expand_as(clean))


@given(head_shapes, st.integers(2, 20), st.floats(0.1, 3), seeds)
def test_scale_multiplies_the_queries(shape, tokens, scale, seed):
    queries, keys = case(shape, tokens, 4, seed)
    scaled = window_attention(queries, keys, scale=scale)
    wanted = attention(queries, keys, scale).sum(2)[..., : scaled.shape[-1]]
    torch.testing.assert_close(scaled.double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduce", ["none", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_window_needs_little_beside_input_and_output(dtype, reduce, masked):
    queries = normal(0, 1, 8, 32, 64, dtype=dtype)
    keys = normal(1, 1, 2, 65536, 64, dtype=dtype)
    mask = torch.ones(1, 65536, dtype=torch.bool) if masked else None
    call = partial(window_attention, queries, keys, key_mask=mask, reduce=reduce, chunk=1024)
    peak = peak_bytes(call)
    result = call()
    given_bytes = queries.nbytes + keys.nbytes + (mask.nbytes if masked else 0)
    assert result.nbytes < peak  # it is part of what was held
    assert given_bytes + peak < 1.25 * (given_bytes + result.nbytes)


def test_the_whole_matrix_is_never_held():
    tokens = 2048
    queries, keys = normal(0, 1, 4, tokens, 8), normal(1, 1, 2, tokens, 8)
    peak = peak_bytes(lambda: accumulated_attention(queries, keys, chunk=256, query_chunk=32))
    # One tile of logits, float32; the result, a block's share of it, what a query needs.
    assert peak < 4 * 4 * (32 * 256 + 3 * tokens)


def test_very_large_logits_stay_finite():
    keys = torch.tensor([[[[100.0], [-100.0], [100.0]]]])
    scores = window_attention(torch.full((1, 1, 1, 1), 100.0), keys, scale=1.0)
    assert torch.equal(scores, torch.tensor([[[0.5, 0.0]]]))


Q, K = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)


@pytest.mark.parametrize("function", [window_attention, accumulated_attention])
@pytest.mark.parametrize(
    ("queries", "keys", "options", "error", "text"),
    [
        (None, K, {}, TypeError, "queries must be a torch.Tensor, got NoneType"),
        (Q[0], K, {}, ValueError, r"queries must have 4 dimensions, got shape \(4, 3, 8\)"),
        (Q.long(), K, {}, TypeError, "queries must be of a floating dtype, got torch.int64"),
        (Q, K[..., :4], {}, ValueError, "queries and keys must agree in batch and head size"),
        (Q[:, :3], K, {}, ValueError, "multiple of the heads of keys, got 3 and 2"),
        (Q, K[:, :, :2], {}, ValueError, "got 3 queries for 2 keys"),
        (Q, K.to("meta"), {}, ValueError, "keys must be on cpu like the other tensors, got meta"),
        (Q.to("meta"), K, {}, ValueError, "keys must be on meta like the other tensors, got cpu"),
        (
            Q,
            K,
            {"key_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")},
            ValueError,
            "key_mask must be on cpu like the other tensors, got meta",
        ),
        (Q, K, {"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        (Q, K, {"scale": "1"}, TypeError, "scale must be a number, got '1'"),
        (Q, K, {"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        (Q, K, {"chunk": 1.5}, TypeError, "chunk must be an int, got 1.5"),
        (Q, K, {"reduce": "sum"}, ValueError, "reduce must be one of none, kv_head, layer, got"),
        (Q, K, {"key_mask": torch.ones(2, 5)}, TypeError, "key_mask must be of dtype torch.bool"),
        (
            Q,
            K,
            {"key_mask": torch.ones(1, 5, dtype=torch.bool)},
            ValueError,
            r"key_mask must have shape \(2, 5\), got \(1, 5\)",
        ),
    ],
)
def test_errors(plain, function, queries, keys, options, error, text):
    with pytest.raises(error, match=text):
        function(queries, keys, **options)
