from __future__ import annotations

import math

import pytest
import torch
from common import dtypes, head_shapes, left_padding, normal, seeds, uniform
from hypothesis import given
from hypothesis import strategies as st

from kv_score import landmark_scores, segment_scores


@given(head_shapes, st.integers(0, 12), st.sampled_from(["mean", "max"]), dtypes, seeds)
def test_segment_scores_equal_the_dot_products(shape, segments, reduce, dtype, seed):
    batch, kv_heads, group = shape
    q_bar = normal(seed, batch, kv_heads * group, 4, dtype=dtype)
    means = normal(seed + 1, batch, kv_heads, segments, 4, dtype=dtype)
    scores = segment_scores(q_bar, means, reduce=reduce)
    assert scores.dtype == torch.float32
    repeated = means.double().repeat_interleave(group, 1)
    dots = (repeated * q_bar.double()[:, :, None]).sum(-1)
    parts = torch.stack([dots[:, head::group] for head in range(group)])
    wanted = parts.mean(0) if reduce == "mean" else parts.amax(0)
    torch.testing.assert_close(scores.double(), wanted, atol=1e-5, rtol=1e-5)


@given(head_shapes, st.integers(1, 12), st.sampled_from(["mean", "max"]), seeds)
def test_masked_segments_are_forbidden_and_never_read(shape, segments, reduce, seed):
    batch, kv_heads, group = shape
    q_bar = normal(seed, batch, kv_heads * group, 4)
    means = normal(seed + 1, batch, kv_heads, segments, 4)
    mask = uniform(seed, batch, segments) < 0.5
    poisoned = means.masked_fill(~mask[:, None, :, None], math.nan)
    scores = segment_scores(q_bar, poisoned, reduce=reduce, mask=mask)
    clean = segment_scores(q_bar, means, reduce=reduce)
    assert torch.equal(scores, clean.masked_fill(~mask[:, None], -math.inf))


@given(
    head_shapes,
    st.integers(0, 4),
    st.integers(1, 12),
    st.none() | st.floats(0.1, 2),
    dtypes,
    seeds,
)
def test_landmark_scores_equal_algorithm_2(shape, count, chunks, scale, dtype, seed):
    batch, kv_heads, group = shape
    queries = normal(seed, batch, kv_heads * group, count, 4, dtype=dtype)
    landmarks = normal(seed + 1, batch, kv_heads, chunks, 4, dtype=dtype)
    mask = uniform(seed, batch, kv_heads, chunks) < 0.7
    scores = landmark_scores(
        queries,
        landmarks.masked_fill(~mask[..., None], math.nan),
        scale=scale,
        mask=mask,
    )
    for row in range(batch):
        for head in range(kv_heads):
            real = landmarks[row, head, mask[row, head]].double()
            best = torch.zeros(len(real), dtype=torch.float64)
            for member in range(group):
                query = queries[row, head * group + member].double()
                logits = query @ real.mT * (0.5 if scale is None else scale)
                weights = (logits - logits.logsumexp(-1, keepdim=True)).exp()
                best = torch.maximum(best, weights.sum(0))
            got = scores[row, head]
            assert (got[~mask[row, head]] == -math.inf).all()
            torch.testing.assert_close(got[mask[row, head]].double(), best, atol=1e-5, rtol=1e-5)


@given(head_shapes, st.integers(0, 6), st.integers(1, 9), st.booleans(), seeds)
def test_queries_that_do_not_exist_add_nothing(shape, count, chunks, masked, seed):
    batch, kv_heads, group = shape
    queries = normal(seed, batch, kv_heads * group, count, 4)
    landmarks = normal(seed + 1, batch, kv_heads, chunks, 4)
    mask = uniform(seed, batch, kv_heads, chunks) < 0.7 if masked else None
    exists, pads = left_padding(seed, batch, count)
    poisoned = queries.masked_fill(~exists[:, None, :, None], math.nan)
    got = landmark_scores(poisoned, landmarks, mask=mask, query_mask=exists)
    for row, pad in enumerate(pads):
        alone = slice(row, row + 1)
        single = landmark_scores(
            queries[alone, :, pad:], landmarks[alone], mask=None if mask is None else mask[alone]
        )
        torch.testing.assert_close(got[alone], single)


@given(head_shapes, st.integers(1, 4), st.integers(1, 12), seeds)
def test_landmark_scores_lie_between_the_mean_and_the_number_of_queries(shape, count, chunks, seed):
    batch, kv_heads, group = shape
    queries = normal(seed, batch, kv_heads * group, count, 4)
    scores = landmark_scores(queries, normal(seed + 1, batch, kv_heads, chunks, 4))
    assert ((scores >= 0) & (scores <= count + 1e-5)).all()
    total = scores.sum(-1)
    assert ((total >= count - 1e-4) & (total <= group * count + 1e-4)).all()


Q, M = torch.zeros(2, 4, 8), torch.zeros(2, 2, 5, 8)


@pytest.mark.parametrize(
    ("q_bar", "means", "options", "error", "text"),
    [
        (Q[0], M, {}, ValueError, "q_bar must have 3 dimensions"),
        (Q, M[0], {}, ValueError, "means must have 4 dimensions"),
        (Q[:, :3], M, {}, ValueError, "the heads of q_bar must be a multiple .* 3 and 2"),
        (Q, M.to("meta"), {}, ValueError, "means must be on cpu like the other .*, got meta"),
        (Q.int(), M, {}, TypeError, "q_bar must be of a floating dtype, got torch.int32"),
        (Q[:1], M, {}, ValueError, "q_bar and means must agree in batch and head size"),
        (Q, M, {"reduce": "sum"}, ValueError, "reduce must be one of mean, max, got 'sum'"),
        (
            Q,
            M,
            {"mask": torch.ones(2, 4, dtype=torch.bool)},
            ValueError,
            r"mask must have shape \(2, 5\), got \(2, 4\)",
        ),
    ],
)
def test_errors_of_segment_scores(plain, q_bar, means, options, error, text):
    with pytest.raises(error, match=text):
        segment_scores(q_bar, means, **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
        ({"mask": torch.ones(2, 2, 5)}, TypeError, "mask must be of dtype torch.bool"),
        ({"query_mask": torch.ones(2, 1)}, TypeError, "query_mask must be of dtype torch.bool"),
        (
            {"query_mask": torch.ones(2, 5, dtype=torch.bool)},
            ValueError,
            r"query_mask must have shape \(2, 1\), got \(2, 5\)",
        ),
        (
            {"mask": torch.ones(2, 2, 5, dtype=torch.bool, device="meta")},
            ValueError,
            "mask must be on cpu like the other tensors, got meta",
        ),
        (
            {"mask": torch.ones(2, 1, 5, dtype=torch.bool)},
            ValueError,
            r"mask must have shape \(2, 2, 5\), got \(2, 1, 5\)",
        ),
    ],
)
def test_errors_of_landmark_scores(plain, options, error, text):
    with pytest.raises(error, match=text):
        landmark_scores(Q[:, :, None], M, **options)
    with pytest.raises(ValueError, match="queries must have 4 dimensions"):
        landmark_scores(Q, M)
