from __future__ import annotations

import math

import pytest
import torch
from common import dtypes, head_shapes, normal, seeds, uniform
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kv_score import chunk_cosine, chunk_distance, chunk_mean, chunk_outliers, chunks

sizes = st.integers(1, 6)
rules = st.sampled_from(["cosine", "distance"])


def reference(keys: Tensor, size: int, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Means, and how badly they fail their chunks by each rule: -inf for a chunk without keys."""
    batch, heads, tokens, width = keys.shape
    means = torch.zeros(batch, heads, tokens // size, width, dtype=torch.float64)
    failure = {
        rule: torch.full(means.shape[:3], -math.inf, dtype=torch.float64)
        for rule in ("cosine", "distance")
    }
    for row in range(batch):
        for head in range(heads):
            for chunk in range(tokens // size):
                span = slice(chunk * size, chunk * size + size)
                real = keys[row, head, span][mask[row, span]].double()
                if len(real):
                    mean = real.mean(0)
                    length = real.norm(dim=1) * mean.norm()
                    means[row, head, chunk] = mean
                    cosine = (real @ mean / length.clamp_min(1e-8)).min()
                    failure["cosine"][row, head, chunk] = -cosine
                    failure["distance"][row, head, chunk] = (real - mean).norm(dim=1).max()
    return means, failure


@given(head_shapes, st.integers(0, 24), sizes, dtypes, st.booleans(), seeds)
def test_figures_of_chunks_equal_the_loop_over_them(shape, tokens, size, dtype, masked, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3, dtype=dtype)
    keys[..., ::5, :] = 0
    mask = torch.ones(shape[0], tokens, dtype=torch.bool)
    if masked:
        mask = uniform(seed, shape[0], tokens) < 0.5
    poisoned = keys.masked_fill(~mask[:, None, :, None], math.nan)
    given_mask = mask if masked else None
    means, failure = reference(keys, size, mask)
    cosine = chunk_cosine(poisoned, size, key_mask=given_mask)
    torch.testing.assert_close(-cosine.double(), failure["cosine"], atol=1e-5, rtol=1e-5)
    distance = chunk_distance(poisoned, size, key_mask=given_mask)
    torch.testing.assert_close(distance.double(), failure["distance"], atol=1e-5, rtol=1e-5)
    found = chunk_mean(poisoned, size, key_mask=given_mask)
    assert found.dtype == dtype
    torch.testing.assert_close(found, means.to(dtype))


@given(head_shapes, st.integers(1, 24), sizes, st.integers(1, 60), seeds)
def test_figures_do_not_depend_on_the_block(shape, tokens, size, block, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3)
    for figure in (chunk_cosine, chunk_distance, chunk_mean):
        whole = figure(keys, size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunks, "_BLOCK", block)
            torch.testing.assert_close(figure(keys, size), whole)


@given(head_shapes, st.integers(1, 24), sizes, seeds)
def test_the_distance_bounds_the_error_of_every_logit(shape, tokens, size, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3)
    query = normal(seed + 1, 3).double()
    whole = keys[:, :, : tokens // size * size].double().unflatten(2, (-1, size))
    error = (whole @ query - (whole.mean(3) @ query)[..., None]).abs()
    bound = chunk_distance(keys, size).double() * query.norm()
    assert (error <= bound[..., None] * (1 + 1e-5) + 1e-6).all()


@given(head_shapes, st.integers(0, 24), sizes, st.integers(0, 9), rules, st.booleans(), seeds)
def test_outliers_are_the_chunks_that_fail_most(shape, tokens, size, count, rule, masked, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3)
    mask = torch.ones(shape[0], tokens, dtype=torch.bool)
    if masked:
        mask = uniform(seed, shape[0], tokens) < 0.4
    found = chunk_outliers(keys, size, count, by=rule, key_mask=mask if masked else None)
    assert found.shape == (shape[0], shape[1], count) and found.dtype == torch.int64
    failure = reference(keys, size, mask)[1][rule]
    for row in range(shape[0]):
        for head in range(shape[1]):
            values = failure[row, head].tolist()
            real = [chunk for chunk, value in enumerate(values) if value > -math.inf]
            chosen = [chunk for chunk in found[row, head].tolist() if chunk >= 0]
            assert found[row, head].tolist() == chosen + [-1] * (count - len(chosen))
            assert chosen == sorted(set(chosen))
            assert len(chosen) == min(count, len(real)) and set(chosen) <= set(real)
            rest = [values[chunk] for chunk in real if chunk not in chosen]
            least = min((values[chunk] for chunk in chosen), default=math.inf)
            assert all(value <= least + 1e-5 for value in rest)


@given(head_shapes, st.integers(0, 6), st.integers(0, 6), sizes, st.integers(0, 5), rules, seeds)
def test_a_row_padded_by_whole_chunks_equals_that_row_alone(
    shape, before, own, size, count, rule, seed
):
    real = normal(seed, shape[0], shape[1], own * size, 3)
    pad = torch.full((*real.shape[:2], before * size, 3), math.nan)
    alone = chunk_outliers(real, size, count, by=rule)
    for keys, moved in ((torch.cat((pad, real), 2), before), (torch.cat((real, pad), 2), 0)):
        mask = ~keys[:, 0, :, 0].isnan()
        found = chunk_outliers(keys, size, count, by=rule, key_mask=mask)
        assert torch.equal(found, torch.where(alone < 0, alone, alone + moved))


@given(st.integers(2, 8), st.integers(3, 10), rules, seeds)
def test_a_planted_outlier_is_found(size, total, rule, seed):
    keys = torch.ones(1, 1, total * size, 4) + 0.01 * normal(seed, 1, 1, total * size, 4)
    place = seed % total
    keys[0, 0, place * size] *= -1
    assert chunk_outliers(keys, size, 1, by=rule).item() == place


def test_only_the_distance_sees_a_long_key_among_short_ones_of_its_direction():
    keys = torch.ones(1, 1, 12, 4)
    keys[:, :, 7] *= 40
    assert chunk_outliers(keys, 3, 1, by="cosine").tolist() == [[[0]]]
    assert chunk_outliers(keys, 3, 1, by="distance").tolist() == [[[2]]]


@pytest.mark.parametrize("rule", ["cosine", "distance"])
def test_the_lower_chunk_wins_a_tie(rule):
    keys = torch.ones(1, 1, 12, 4)
    assert chunk_outliers(keys, 3, 2, by=rule).tolist() == [[[0, 1]]]


K = torch.zeros(2, 2, 5, 8)


@pytest.mark.parametrize(
    ("keys", "size", "count", "mask", "error", "text"),
    [
        (K[0], 2, 1, None, ValueError, "keys must have 4 dimensions"),
        (K, 0, 1, None, ValueError, "size must be at least 1, got 0"),
        (K, 2, -1, None, ValueError, "count must not be negative, got -1"),
        (K, 2, 1.0, None, TypeError, "count must be an int, got 1.0"),
        (K.int(), 2, 1, None, TypeError, "keys must be of a floating dtype, got torch.int32"),
        (
            K,
            2,
            1,
            torch.ones(2, 4, dtype=torch.bool),
            ValueError,
            r"key_mask must have shape \(2, 5\), got \(2, 4\)",
        ),
        (
            K,
            2,
            1,
            torch.ones(2, 5, dtype=torch.bool, device="meta"),
            ValueError,
            "key_mask must be on cpu like the other tensors, got meta",
        ),
        (K, 2, 1, torch.ones(2, 5), TypeError, "key_mask must be of dtype torch.bool"),
    ],
)
def test_errors(plain, keys, size, count, mask, error, text):
    with pytest.raises(error, match=text):
        chunk_outliers(keys, size, count, key_mask=mask)


def test_an_unknown_rule(plain):
    with pytest.raises(ValueError, match="by must be one of cosine, distance, got 'norm'"):
        chunk_outliers(K, 2, 1, by="norm")
