from __future__ import annotations

import math

import pytest
import torch
from common import dtypes, head_shapes, normal, seeds, uniform
from hypothesis import given
from hypothesis import strategies as st

from kv_score import chunk_cosine, chunk_outliers, chunks

sizes = st.integers(1, 6)


def reference(keys: torch.Tensor, size: int, mask: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, _ = keys.shape
    lowest = torch.full((batch, heads, tokens // size), math.inf, dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            for chunk in range(tokens // size):
                span = slice(chunk * size, chunk * size + size)
                real = keys[row, head, span][mask[row, span]].double()
                if len(real):
                    mean = real.mean(0)
                    length = real.norm(dim=1) * mean.norm()
                    lowest[row, head, chunk] = (real @ mean / length.clamp_min(1e-8)).min()
    return lowest


@given(head_shapes, st.integers(0, 24), sizes, dtypes, st.booleans(), seeds)
def test_cosine_equals_the_loop_over_chunks(shape, tokens, size, dtype, masked, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3, dtype=dtype)
    keys[..., ::5, :] = 0
    mask = torch.ones(shape[0], tokens, dtype=torch.bool)
    if masked:
        mask = uniform(seed, shape[0], tokens) < 0.5
    poisoned = keys.masked_fill(~mask[:, None, :, None], math.nan)
    cosine = chunk_cosine(poisoned, size, key_mask=mask if masked else None)
    wanted = reference(keys, size, mask)
    torch.testing.assert_close(cosine.double(), wanted, atol=1e-5, rtol=1e-5)


@given(head_shapes, st.integers(1, 24), sizes, st.integers(1, 9), seeds)
def test_cosine_does_not_depend_on_the_chunk(shape, tokens, size, step, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3)
    whole = chunk_cosine(keys, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_CHUNK", step)
        torch.testing.assert_close(chunk_cosine(keys, size), whole)


@given(head_shapes, st.integers(0, 24), sizes, st.integers(0, 9), st.booleans(), seeds)
def test_outliers_are_the_lowest_cosines(shape, tokens, size, count, masked, seed):
    keys = normal(seed, shape[0], shape[1], tokens, 3)
    mask = torch.ones(shape[0], tokens, dtype=torch.bool)
    if masked:
        mask = uniform(seed, shape[0], tokens) < 0.4
    found = chunk_outliers(keys, size, count, key_mask=mask if masked else None)
    assert found.shape == (shape[0], shape[1], count) and found.dtype == torch.int64
    cosine = reference(keys, size, mask)
    for row in range(shape[0]):
        for head in range(shape[1]):
            values = cosine[row, head].tolist()
            real = [chunk for chunk, value in enumerate(values) if value < math.inf]
            chosen = [chunk for chunk in found[row, head].tolist() if chunk >= 0]
            assert found[row, head].tolist() == chosen + [-1] * (count - len(chosen))
            assert chosen == sorted(set(chosen))
            assert len(chosen) == min(count, len(real)) and set(chosen) <= set(real)
            rest = [values[chunk] for chunk in real if chunk not in chosen]
            worst = max((values[chunk] for chunk in chosen), default=-math.inf)
            assert all(value >= worst - 1e-5 for value in rest)


@given(head_shapes, st.integers(0, 6), st.integers(0, 6), sizes, st.integers(0, 5), seeds)
def test_a_row_padded_by_whole_chunks_equals_that_row_alone(shape, before, own, size, count, seed):
    real = normal(seed, shape[0], shape[1], own * size, 3)
    pad = torch.full((*real.shape[:2], before * size, 3), math.nan)
    alone = chunk_outliers(real, size, count)
    for keys, moved in ((torch.cat((pad, real), 2), before), (torch.cat((real, pad), 2), 0)):
        mask = ~keys[:, 0, :, 0].isnan()
        found = chunk_outliers(keys, size, count, key_mask=mask)
        assert torch.equal(found, torch.where(alone < 0, alone, alone + moved))


@given(st.integers(2, 8), st.integers(3, 10), seeds)
def test_a_planted_outlier_is_found(size, total, seed):
    keys = torch.ones(1, 1, total * size, 4) + 0.01 * normal(seed, 1, 1, total * size, 4)
    place = seed % total
    keys[0, 0, place * size] *= -1
    assert chunk_outliers(keys, size, 1).item() == place


def test_the_lower_chunk_wins_a_tie():
    keys = torch.ones(1, 1, 12, 4)
    assert chunk_outliers(keys, 3, 2).tolist() == [[[0, 1]]]


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
