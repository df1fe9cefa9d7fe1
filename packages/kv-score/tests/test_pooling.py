from __future__ import annotations

import math

import pytest
import torch
from common import normal, seeds, uniform
from hypothesis import given
from hypothesis import strategies as st

from kv_score import pool

kernels = st.integers(0, 5).map(lambda half: 2 * half + 1)
modes = st.sampled_from(["avg", "max"])


def case(seed: int, heads: int, tokens: int) -> torch.Tensor:
    scores = normal(seed, 2, heads, tokens)
    return scores.masked_fill(uniform(seed, 2, heads, tokens) < 0.3, -math.inf)


@given(st.integers(1, 3), st.integers(0, 20), kernels, modes, seeds)
def test_pool_equals_the_loop_over_windows(heads, tokens, kernel, mode, seed):
    scores = case(seed, heads, tokens)
    pooled = pool(scores, mode, kernel=kernel)
    assert pooled.shape == scores.shape
    for row in range(2):
        for head in range(heads):
            values = scores[row, head].tolist()
            for j, value in enumerate(values):
                window = values[max(0, j - kernel // 2) : j + kernel // 2 + 1]
                window = [other for other in window if other > -math.inf]
                if value == -math.inf:
                    wanted = -math.inf
                else:
                    wanted = max(window) if mode == "max" else math.fsum(window) / len(window)
                assert pooled[row, head, j].item() == pytest.approx(wanted, abs=1e-5)


@given(st.integers(1, 3), st.integers(0, 20), kernels, seeds)
def test_mode_none_and_kernel_one_change_nothing(heads, tokens, kernel, seed):
    scores = case(seed, heads, tokens)
    assert torch.equal(pool(scores, "none", kernel=kernel), scores)
    for mode in ("avg", "max"):
        torch.testing.assert_close(pool(scores, mode, kernel=1), scores)


@given(st.integers(1, 20), kernels, seeds, st.floats(-2, 2))
def test_mean_lies_below_maximum_and_both_keep_constants(tokens, kernel, seed, constant):
    scores = case(seed, 2, tokens)
    assert (pool(scores, "avg", kernel=kernel) <= pool(scores, "max", kernel=kernel) + 1e-6).all()
    level = torch.where(scores > -math.inf, constant, scores)
    for mode in ("avg", "max"):
        torch.testing.assert_close(pool(level, mode, kernel=kernel), level)


@pytest.mark.parametrize(
    ("scores", "mode", "kernel", "error", "text"),
    [
        (torch.full((1, 1, 2), math.nan), "avg", 3, ValueError, "scores must not hold NaN, got 2"),
        (torch.full((1, 1, 2), math.inf), "avg", 3, ValueError, "finite or -inf .*, got \\+inf"),
        (torch.zeros(1, 1, 2).to("meta"), "avg", 3, ValueError, "scores must hold values, got a t"),
        (torch.zeros(1, 2), "avg", 3, ValueError, "scores must have 3 dimensions"),
        (torch.zeros(1, 1, 2).double(), "avg", 3, TypeError, "scores must be of dtype torch.float"),
        (torch.zeros(1, 1, 2), "sum", 3, ValueError, "mode must be one of none, avg, max, got 'su"),
        (torch.zeros(1, 1, 2), "avg", 4, ValueError, "kernel must be odd .*, got 4"),
        (torch.zeros(1, 1, 2), "avg", 0, ValueError, "kernel must be at least 1, got 0"),
    ],
)
def test_errors(plain, scores, mode, kernel, error, text):
    with pytest.raises(error, match=text):
        pool(scores, mode, kernel=kernel)
