from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from common import cuts, dtypes, normal, seeds, uniform
from hypothesis import given
from hypothesis import strategies as st

from kv_score import segment_guided, segment_mean, segment_statistics, segments

shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 24))


def ragged(seed: int, batch: int, tokens: int, most: int = 6) -> torch.Tensor:
    """Offsets [B, S+1] whose rows begin after padding, end anywhere and hold empty segments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tokens + 1, (batch, most), generator=generator).sort(-1).values


def either(seed: int, batch: int, tokens: int) -> torch.Tensor:
    return ragged(seed, batch, tokens) if seed % 2 else cuts(seed, tokens, 8)


def pieces(offsets: torch.Tensor, row: int) -> list[tuple[int, int]]:
    bounds = (offsets if offsets.ndim == 1 else offsets[row]).tolist()
    return list(pairwise(bounds))


def scores_of(seed: int, batch: int, heads: int, tokens: int) -> torch.Tensor:
    scores = uniform(seed, batch, heads, tokens) ** 3
    scores = scores.masked_fill(uniform(seed + 1, batch, heads, tokens) < 0.1, 0.0)
    return scores.masked_fill(uniform(seed + 2, batch, heads, tokens) < 0.2, -math.inf)


def reference(scores: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, _ = scores.shape
    mean = torch.zeros(batch, heads, offsets.shape[-1] - 1, dtype=torch.float64)
    entropy = torch.zeros_like(mean)
    for row in range(batch):
        for head in range(heads):
            for k, (start, stop) in enumerate(pieces(offsets, row)):
                values = [s for s in scores[row, head, start:stop].tolist() if s > -math.inf]
                total = math.fsum(values)
                mean[row, head, k] = total / len(values) if values else -math.inf
                if len(values) > 1 and total > 0:
                    parts = [value / total for value in values if value > 0]
                    bits = -math.fsum(part * math.log(part) for part in parts)
                    entropy[row, head, k] = bits / math.log(len(values))
    return mean, entropy


@given(shapes, dtypes, st.sampled_from(["none", "heads", "shared"]), seeds)
def test_segment_mean_equals_the_loop(shape, dtype, kind, seed):
    batch, heads, tokens = shape
    x = normal(seed, batch, heads, tokens, 3, dtype=dtype)
    offsets = either(seed, batch, tokens)
    weights = None
    if kind != "none":
        weights = uniform(seed + 3, batch, heads if kind == "heads" else 1, tokens)
        weights[weights < 0.3] = 0.0
    means = segment_mean(x, offsets, weights)
    assert means.dtype == dtype
    share = torch.ones(batch, heads, tokens) if weights is None else weights.expand(-1, heads, -1)
    for row in range(batch):
        for k, (start, stop) in enumerate(pieces(offsets, row)):
            w = share[row, :, start:stop, None].double()
            total = (x[row, :, start:stop].double() * w).sum(1)
            wanted = total / w.sum(1).clamp_min(1e-300)
            torch.testing.assert_close(
                means[row, :, k].double(), wanted.to(dtype).double(), atol=1e-6, rtol=1e-2
            )
            if dtype == torch.float32:
                torch.testing.assert_close(means[row, :, k].double(), wanted, atol=1e-5, rtol=1e-5)


@given(shapes, seeds)
def test_segment_mean_never_reads_outside_or_at_weight_zero(shape, seed):
    batch, heads, tokens = shape
    x = normal(seed, batch, heads, tokens, 3)
    offsets = ragged(seed, batch, tokens)
    weights = uniform(seed, batch, heads, tokens)
    weights[weights < 0.4] = 0.0
    token = torch.arange(tokens)
    outside = (token < offsets[:, :1]) | (token >= offsets[:, -1:])
    unread = outside[:, None] | (weights == 0)
    poisoned = x.masked_fill(unread[..., None], math.nan)
    assert torch.equal(segment_mean(poisoned, offsets, weights), segment_mean(x, offsets, weights))


@given(shapes, seeds)
def test_segment_mean_crosses_chunks(shape, seed):
    batch, heads, tokens = shape
    x, offsets = normal(seed, batch, heads, tokens, 3), either(seed, batch, tokens)
    whole = segment_mean(x, offsets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_CHUNK", 5)
        torch.testing.assert_close(segment_mean(x, offsets), whole, atol=1e-6, rtol=1e-5)


@given(shapes, seeds)
def test_mean_of_equal_weights_is_the_plain_mean(shape, seed):
    batch, heads, tokens = shape
    x, offsets = normal(seed, batch, heads, tokens, 3), either(seed, batch, tokens)
    weights = torch.full((batch, 1, tokens), 0.25)
    torch.testing.assert_close(segment_mean(x, offsets, weights), segment_mean(x, offsets))


@given(shapes, seeds)
def test_statistics_equal_the_loop(shape, seed):
    batch, heads, tokens = shape
    scores, offsets = scores_of(seed, batch, heads, tokens), either(seed, batch, tokens)
    mean, entropy = segment_statistics(scores, offsets)
    wanted_mean, wanted_entropy = reference(scores, offsets)
    torch.testing.assert_close(mean.double(), wanted_mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-6, rtol=1e-5)


@given(shapes, seeds)
def test_entropy_lies_within_zero_and_log_n(shape, seed):
    batch, heads, tokens = shape
    scores, offsets = scores_of(seed, batch, heads, tokens), either(seed, batch, tokens)
    _, entropy = segment_statistics(scores, offsets)
    for row in range(batch):
        for k, (start, stop) in enumerate(pieces(offsets, row)):
            count = (scores[row, :, start:stop] > -math.inf).sum(-1)
            nats = entropy[row, :, k] * count.clamp_min(1).log()
            assert (nats >= 0).all()
            assert (nats <= count.clamp_min(1).log()).all()


@given(shapes, st.floats(1e-3, 1e3), seeds)
def test_entropy_is_normalised_and_ignores_the_scale(shape, factor, seed):
    batch, heads, tokens = shape
    scores, offsets = scores_of(seed, batch, heads, tokens), either(seed, batch, tokens)
    _, entropy = segment_statistics(scores, offsets)
    assert ((entropy >= 0) & (entropy <= 1)).all()
    _, scaled = segment_statistics(scores * factor, offsets)
    torch.testing.assert_close(scaled, entropy, atol=1e-5, rtol=1e-4)


@given(st.integers(2, 20), st.floats(1e-6, 1e3))
def test_entropy_at_its_ends(tokens, level):
    even = torch.full((1, 1, tokens), level)
    one = torch.zeros(1, 1, tokens)
    one[..., tokens // 2] = level
    offsets = torch.tensor([0, tokens])
    assert segment_statistics(even, offsets)[1].item() == pytest.approx(1.0, abs=1e-6)
    assert segment_statistics(one, offsets)[1].item() == 0.0
    assert segment_statistics(even[..., :1], torch.tensor([0, 1]))[1].item() == 0.0


@given(shapes, st.floats(0, 3), st.floats(0, 3), seeds)
def test_guided_scores_equal_the_formula(shape, beta, lam, seed):
    batch, heads, tokens = shape
    scores, offsets = scores_of(seed, batch, heads, tokens), either(seed, batch, tokens)
    guided = segment_guided(scores, offsets, beta=beta, lam=lam)
    mean, entropy = reference(scores, offsets)
    for row in range(batch):
        for head in range(heads):
            wanted = scores[row, head].double()
            finite = [m for m in mean[row, head].tolist() if m > -math.inf]
            top = max(finite, default=0.0)
            for k, (start, stop) in enumerate(pieces(offsets, row)):
                if stop == start or mean[row, head, k] == -math.inf:
                    continue
                share = mean[row, head, k].item() / top if top > 0 else 0.0
                weight = (share + beta * entropy[row, head, k].item()) ** lam
                part = wanted[start:stop]
                wanted[start:stop] = torch.where(part > -math.inf, part * weight, part)
            torch.testing.assert_close(guided[row, head].double(), wanted, atol=1e-4, rtol=1e-3)


@given(shapes, st.floats(0, 3), st.floats(0, 3), seeds)
def test_guiding_keeps_the_order_inside_a_segment(shape, beta, lam, seed):
    batch, heads, tokens = shape
    scores, offsets = scores_of(seed, batch, heads, tokens), either(seed, batch, tokens)
    guided = segment_guided(scores, offsets, beta=beta, lam=lam)
    for row in range(batch):
        for start, stop in pieces(offsets, row):
            order = scores[row, :, start:stop].argsort(-1)
            sorted_ = guided[row, :, start:stop].gather(-1, order)
            assert (sorted_[..., 1:] >= sorted_[..., :-1]).all()


@given(shapes, st.floats(0, 1e4), st.floats(0, 9), st.floats(0, 3e38), seeds)
def test_guided_scores_stay_finite_and_in_order(shape, beta, lam, largest, seed):
    batch, heads, tokens = shape
    scores, offsets = scores_of(seed, batch, heads, tokens) * largest, either(seed, batch, tokens)
    scores.masked_fill_(scores.isnan(), -math.inf)  # forbidden times 0
    guided = segment_guided(scores, offsets, beta=beta, lam=lam)
    assert torch.equal(guided.isfinite(), scores > -math.inf)
    for row in range(batch):
        for start, stop in pieces(offsets, row):
            order = scores[row, :, start:stop].argsort(-1)
            sorted_ = guided[row, :, start:stop].gather(-1, order)
            assert (sorted_[..., 1:] >= sorted_[..., :-1]).all()


@given(shapes, st.floats(0, 3), seeds)
def test_guiding_with_lambda_zero_changes_nothing(shape, beta, seed):
    batch, heads, tokens = shape
    scores, offsets = scores_of(seed, batch, heads, tokens), either(seed, batch, tokens)
    assert torch.equal(segment_guided(scores, offsets, beta=beta, lam=0.0), scores)


@given(shapes, st.floats(0, 3), st.floats(0, 3), seeds)
def test_forbidden_tokens_stay_forbidden_and_strays_keep_their_score(shape, beta, lam, seed):
    batch, heads, tokens = shape
    scores, offsets = scores_of(seed, batch, heads, tokens), ragged(seed, batch, tokens)
    guided = segment_guided(scores, offsets, beta=beta, lam=lam)
    assert torch.equal(guided == -math.inf, scores == -math.inf)
    token = torch.arange(tokens)
    outside = (token < offsets[:, :1]) | (token >= offsets[:, -1:])
    outside = outside[:, None].expand_as(scores)
    assert torch.equal(guided[outside], scores[outside])


SCORES, OFFSETS = torch.zeros(2, 1, 4), torch.tensor([0, 2, 4])


@pytest.mark.parametrize(
    ("scores", "offsets", "error", "text"),
    [
        (SCORES, [0, 4], TypeError, "offsets must be a torch.Tensor, got list"),
        (SCORES, OFFSETS.int(), TypeError, "offsets must be of dtype torch.int64, got torch.int32"),
        (
            SCORES,
            OFFSETS[None, None],
            ValueError,
            r"offsets must have shape \[S\+1\] or \[B, S\+1\], got",
        ),
        (
            SCORES,
            OFFSETS[:0],
            ValueError,
            r"offsets must have shape \[S\+1\] or \[B, S\+1\], got",
        ),
        (SCORES, OFFSETS.expand(3, 3), ValueError, r"offsets must have 2 rows, got shape \(3, 3\)"),
        (SCORES, torch.tensor([0, 3, 2, 4]), ValueError, r"never fall .*, got \[0, 3, 2, 4\]"),
        (SCORES, torch.tensor([0, 5]), ValueError, "lie within 0 and T = 4, got 0 to 5"),
        (SCORES, torch.tensor([-1, 4]), ValueError, "lie within 0 and T = 4, got -1 to 4"),
        (SCORES, torch.tensor([1, 4]), ValueError, "begin at 0 and end at T = 4, got 1 to 4"),
        (
            SCORES,
            OFFSETS.to("meta"),
            ValueError,
            "offsets must be on cpu like the other tensors, got meta",
        ),
        (SCORES / 0, OFFSETS, ValueError, "scores must not hold NaN, got 8"),
        (SCORES.to("meta"), OFFSETS, ValueError, "scores must hold values, got a tensor on meta"),
        (SCORES[0], OFFSETS, ValueError, r"scores must have 3 dimensions, got shape \(1, 4\)"),
        (SCORES.half(), OFFSETS, TypeError, "scores must be of dtype torch.float32, got torch.fl"),
        (SCORES - 1, OFFSETS, ValueError, "scores must not be negative .*, got -1"),
    ],
)
def test_errors(plain, scores, offsets, error, text):
    with pytest.raises(error, match=text):
        segment_statistics(scores, offsets)
    with pytest.raises(error, match=text):
        segment_guided(scores, offsets, beta=1.0, lam=1.0)
    if text.startswith("offsets"):
        with pytest.raises(error, match=text):
            segment_mean(scores[..., None], offsets)


def test_long_offsets_are_cut_short_in_the_error(plain):
    falling = torch.arange(40, -1, -1)
    with pytest.raises(ValueError, match=r"got \[40, 39, .*, 25, \.\.\.\]"):
        segment_statistics(torch.zeros(1, 1, 40), falling)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"beta": -1.0, "lam": 1.0}, ValueError, "beta must be finite and at least 0, got -1.0"),
        ({"beta": 1.0, "lam": math.inf}, ValueError, "lam must be finite and at least 0, got inf"),
        ({"beta": "1", "lam": 1.0}, TypeError, "beta must be a number, got '1'"),
        ({"beta": 1e9, "lam": 5.0}, ValueError, r"\(1 \+ beta\) \*\* lam .*, got 1e\+09 and 5"),
    ],
)
def test_errors_of_the_guide(plain, options, error, text):
    with pytest.raises(error, match=text):
        segment_guided(SCORES, OFFSETS, **options)


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        (SCORES - 1, ValueError, "weights must be finite and not negative, got -1"),
        (SCORES / 0, ValueError, "weights must be finite and not negative, got nan"),
        (SCORES.bool(), TypeError, "weights must be of a floating dtype, got torch.bool"),
        (SCORES[:1], ValueError, r"weights must have shape \(2, 1, 4\), got \(1, 1, 4\)"),
        (SCORES[0], ValueError, "weights must have 3 dimensions"),
        (SCORES.to("meta"), ValueError, "weights must be on cpu"),
    ],
)
def test_errors_of_the_weights(plain, weights, error, text):
    with pytest.raises(error, match=text):
        segment_mean(torch.zeros(2, 1, 4, 3), OFFSETS, weights)
