"""One pass gives what attention and its column sums give, written out in float64."""

from __future__ import annotations

import pytest
import torch
from common import attention, dtypes, head_shapes, normal, over_heads, peak_bytes, seeds
from hypothesis import given
from hypothesis import strategies as st

from kv_score import attend_and_accumulate

reductions = st.sampled_from(["none", "kv_head", "layer"])


@given(
    head_shapes,
    st.integers(0, 24),
    st.integers(0, 24),
    reductions,
    dtypes,
    st.integers(1, 60),
    seeds,
)
def test_both_equal_the_written_out_softmax(shape, tokens, count, reduce, dtype, rows, seed):
    batch, kv_heads, group = shape
    count = min(count, tokens)
    queries = normal(seed, batch, kv_heads * group, count, 4, dtype=dtype) * 2
    keys = normal(seed + 1, batch, kv_heads, tokens, 4, dtype=dtype) * 2
    values = normal(seed + 2, batch, kv_heads, tokens, 3, dtype=dtype)
    out, scores = attend_and_accumulate(queries, keys, values, reduce=reduce, rows=rows)
    weights = attention(queries, keys)
    assert out.dtype == dtype and scores.dtype == torch.float32
    torch.testing.assert_close(
        scores.double(), over_heads(weights.sum(2), reduce, kv_heads), atol=1e-5, rtol=1e-5
    )
    wanted = weights @ values.double().repeat_interleave(group, 1)
    rounding = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=rounding, rtol=rounding)


@given(head_shapes, st.integers(1, 24), st.floats(0.05, 8), seeds)
def test_scale_multiplies_the_queries(shape, tokens, scale, seed):
    batch, kv_heads, group = shape
    queries = normal(seed, batch, kv_heads * group, tokens, 4)
    keys, values = (normal(seed + i, batch, kv_heads, tokens, 4) for i in (1, 2))
    ours = attend_and_accumulate(queries, keys, values, scale=scale)
    wanted = attend_and_accumulate(queries * scale, keys, values, scale=1.0)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_very_large_logits_stay_finite():
    queries, keys = normal(0, 1, 2, 9, 4) * 1e4, normal(1, 1, 1, 9, 4) * 1e4
    out, scores = attend_and_accumulate(queries, keys, keys)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(scores.sum(), torch.tensor(18.0))


def test_one_block_of_large_logits_among_small_ones():
    queries, keys, values = (normal(i, 1, 1, 8, 4) for i in range(3))
    queries[:, :, 3] *= 100
    out, scores = attend_and_accumulate(queries, keys, values, rows=2)
    weights = attention(queries, keys)
    torch.testing.assert_close(out.double(), weights @ values.double(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.double(), weights.sum(2), atol=1e-4, rtol=1e-4)


@given(
    st.integers(2, 40),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.floats(0, 400),
    st.sampled_from([-1, 0, 1]),
    st.sampled_from([1e-3, 1.0, 1e30]),
    st.integers(1, 40),
    seeds,
)
def test_logits_of_any_size(tokens, dtype, largest, sign, value, rows, seed):
    # On one side, all logits are close to the largest or to the least that their bound allows.
    queries, keys = (normal(seed + i, 1, 1, tokens, 4) for i in range(2))
    if sign:
        queries, keys = queries.abs() + 1, keys.abs() + 1
    queries /= queries.norm(dim=-1).amax()
    keys *= (sign or 1) * largest / keys.norm(dim=-1).amax()
    queries, keys = queries.to(dtype), keys.to(dtype)
    values = (normal(seed + 2, 1, 1, tokens, 3) * value).to(dtype)
    out, scores = attend_and_accumulate(queries, keys, values, scale=1.0, rows=rows)
    weights = attention(queries, keys, 1.0)
    torch.testing.assert_close(scores.double(), weights.sum(2), atol=1e-5, rtol=1e-3)
    rounding = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(
        out.double() / value, weights @ values.double() / value, atol=rounding, rtol=rounding
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [1.0, 300.0])
@pytest.mark.parametrize("tokens", [4095, 4097, 9000])
def test_more_keys_than_are_looked_at_together(tokens, largest, dtype):
    queries, keys = normal(0, 1, 4, 70, 16), normal(1, 1, 2, tokens, 16)
    queries, keys = ((x / x.norm(dim=-1).amax()).to(dtype) for x in (queries, keys))
    values = normal(2, 1, 2, tokens, 8, dtype=dtype)
    out, scores = attend_and_accumulate(queries, keys, values, scale=largest, rows=64)
    weights = attention(queries, keys, largest)
    torch.testing.assert_close(scores.double(), weights.sum(2), atol=1e-5, rtol=1e-3)
    wanted = weights @ values.double().repeat_interleave(2, 1)
    rounding = {torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=rounding, rtol=rounding)


def test_without_onednn(monkeypatch):
    queries, keys, values = normal(0, 1, 4, 70, 16), normal(1, 1, 2, 90, 16), normal(2, 1, 2, 90, 8)
    ours = attend_and_accumulate(queries, keys, values)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    for one, other in zip(attend_and_accumulate(queries, keys, values), ours, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_under_autocast():
    queries, keys, values = normal(0, 1, 4, 70, 16), normal(1, 1, 2, 90, 16), normal(2, 1, 2, 90, 8)
    ours = attend_and_accumulate(queries, keys, values)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_and_accumulate(queries, keys, values)
    for one, other in zip(found, ours, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-2)


def test_the_whole_matrix_is_never_held():
    queries, keys = normal(0, 1, 2, 1024, 8), normal(1, 1, 1, 1024, 8)
    whole = 2 * 1024 * 1024 * 4
    assert peak_bytes(lambda: attend_and_accumulate(queries, keys, keys, rows=64)) < whole / 5


Q, K = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8)


@pytest.mark.parametrize(
    ("queries", "keys", "values", "options", "error", "text"),
    [
        (Q, K, K[:, :, 1:], {}, ValueError, "values must be those of keys, got"),
        (Q, K[:, :, :2], K[:, :, :2], {}, ValueError, "got 3 queries for 2 keys"),
        (Q, K, "v", {}, TypeError, "values must be a torch.Tensor"),
        (Q[:, :3], K, K, {}, ValueError, "heads of queries must be a multiple"),
        (Q, K, K, {"rows": 0}, ValueError, "rows must be"),
        (Q, K, K, {"reduce": "sum"}, ValueError, "reduce must be"),
        (Q, K, K, {"scale": "1"}, TypeError, "scale must be"),
    ],
)
def test_errors(plain, queries, keys, values, options, error, text):
    with pytest.raises(error, match=text):
        attend_and_accumulate(queries, keys, values, **options)
