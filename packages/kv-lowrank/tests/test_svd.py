from __future__ import annotations

import math

import pytest
import torch
from common import batches, dtypes, normal, precision, seeds, spectrum, tail
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_lowrank import LowRank, choose_method, singular_values, svd, truncated_svd

sizes = st.integers(1, 20)
ranks = st.integers(1, 12)
methods = st.sampled_from(["auto", "exact", "gram", "randomized"])
decays = st.sampled_from([1.0, 0.9, 0.5, 0.1])
ROUNDING = 1e-5  # of the norm: factors are float32


def error(x: torch.Tensor, factors: LowRank) -> torch.Tensor:
    return (x.double() - factors.left.double() @ factors.right.double()).norm(dim=(-2, -1))


@given(
    batches, sizes, sizes, ranks, decays, dtypes, st.sampled_from(["auto", "exact", "gram"]), seeds
)
def test_eckart_young(batch, tokens, width, rank, decay, dtype, method, seed):
    x = spectrum(seed, batch, tokens, width, decay).to(dtype)
    factors = truncated_svd(x, rank, method=method, dtype=torch.float64)
    norm = x.double().norm(dim=(-2, -1))
    best = tail(x, rank)
    assert (error(x, factors) <= best * (1 + 1e-4) + ROUNDING * norm).all()
    assert (error(x, factors) >= best * (1 - 1e-4) - ROUNDING * norm).all()


@given(batches, sizes, sizes, ranks, decays, dtypes, seeds)
def test_randomized_is_within_five_percent(batch, tokens, width, rank, decay, dtype, seed):
    x = spectrum(seed, batch, tokens, width, decay).to(dtype)
    factors = truncated_svd(x, rank, method="randomized", dtype=torch.float64)
    norm = x.double().norm(dim=(-2, -1))
    assert (error(x, factors) <= tail(x, rank) * 1.05 + ROUNDING * norm).all()


@given(st.integers(30, 60), st.integers(30, 60), st.integers(1, 8), decays, seeds)
def test_randomized_is_within_five_percent_beyond_its_oversampling(
    tokens, width, rank, decay, seed
):
    x = spectrum(seed, (), tokens, width, decay)
    assume(tail(x, rank) > 1e-6)
    factors = truncated_svd(x, rank, method="randomized")
    assert error(x, factors) <= tail(x, rank) * 1.05


@given(batches, sizes, sizes, dtypes, methods, seeds)
def test_exact_at_full_rank(batch, tokens, width, dtype, method, seed):
    x = normal(seed, *batch, tokens, width, dtype=dtype)
    factors = truncated_svd(x, min(tokens, width), method=method)
    assert factors.left.dtype == factors.right.dtype == dtype
    assert (error(x, factors) <= precision[dtype] * x.double().norm(dim=(-2, -1))).all()


@given(batches, sizes, sizes, ranks, decays, methods, seeds)
def test_right_factors_are_orthonormal_and_singular_values_fall(
    batch, tokens, width, rank, decay, method, seed
):
    x = spectrum(seed, batch, tokens, width, decay).float()
    factors = truncated_svd(x, rank, method=method)
    kept = min(rank, tokens, width)
    assert factors.left.shape == (*batch, tokens, kept)
    assert factors.right.shape == (*batch, kept, width)
    gram = factors.right @ factors.right.mT
    torch.testing.assert_close(gram, torch.eye(kept).expand_as(gram), atol=1e-5, rtol=0)
    sigma = singular_values(factors)
    assert (sigma.diff(dim=-1) <= 1e-5 * sigma[..., :1]).all()
    torch.testing.assert_close(
        sigma[..., 0], torch.ones(batch), atol=1e-5 if method != "randomized" else 0.05, rtol=0
    )


@given(batches, sizes, sizes, st.integers(0, 4), ranks, methods, seeds)
def test_rank_deficient_matrices_are_exact_from_their_rank_on(
    batch, tokens, width, true_rank, rank, method, seed
):
    x = normal(seed, *batch, tokens, true_rank) @ normal(seed + 1, *batch, true_rank, width)
    factors = truncated_svd(x, rank, method=method)
    if min(rank, tokens, width) >= min(true_rank, tokens, width):
        assert (error(x, factors) <= 1e-5 * x.double().norm(dim=(-2, -1)) + 1e-12).all()
    gram = factors.right @ factors.right.mT
    torch.testing.assert_close(gram, torch.eye(gram.shape[-1]).expand_as(gram), atol=1e-5, rtol=0)


@given(sizes, sizes, st.floats(-3, 3), methods)
def test_constant_matrices_have_rank_one(tokens, width, level, method):
    x = torch.full((tokens, width), level)
    factors = truncated_svd(x, 1, method=method)
    torch.testing.assert_close(factors.left @ factors.right, x, atol=1e-5, rtol=1e-5)


@given(batches, sizes, sizes, ranks, methods, seeds)
def test_masked_rows_are_never_read(batch, tokens, width, rank, method, seed):
    x = normal(seed, *batch, tokens, width)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(*batch, tokens, generator=generator) < 0.6
    poisoned = x.masked_fill(~mask[..., None], math.nan)
    factors = truncated_svd(poisoned, rank, method=method, mask=mask)
    assert not factors.left[~mask].any()
    clean = x.masked_fill(~mask[..., None], 0.0)
    best, norm = tail(clean, rank), clean.double().norm(dim=(-2, -1))
    slack = 1.05 if method == "randomized" else 1 + 1e-4
    assert (error(clean, factors) <= best * slack + ROUNDING * norm).all()


@given(st.integers(1, 3), sizes, sizes, ranks, methods, seeds)
def test_rows_of_a_batch_do_not_mix(batch, tokens, width, rank, method, seed):
    x = normal(seed, batch, tokens, width)
    together = truncated_svd(x, rank, method=method)
    whole = together.left @ together.right
    for row in range(batch):
        alone = truncated_svd(x[row], rank, method=method)
        loss = (x[row] - alone.left @ alone.right).norm()
        torch.testing.assert_close((x[row] - whole[row]).norm(), loss, atol=1e-4, rtol=0.05)


@given(st.integers(1, 30), sizes, ranks, st.integers(1, 9), seeds)
def test_gram_does_not_depend_on_its_blocks(tokens, width, rank, block, seed):
    x = normal(seed, tokens, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svd, "_ROWS", block)
        factors = truncated_svd(x, rank, method="gram")
    norm = x.norm().item()
    assert error(x, factors).item() == pytest.approx(
        tail(x, rank).item(), rel=1e-4, abs=ROUNDING * norm
    )


@given(st.integers(100, 200), st.integers(65, 160), st.integers(1, 60), seeds)
def test_gram_of_wide_matrices_in_triangular_blocks(tokens, width, rank, seed):
    x = spectrum(seed, (), tokens, width, 0.95).float()
    factors = truncated_svd(x, rank, method="gram")
    assert error(x, factors).item() == pytest.approx(tail(x, rank).item(), rel=1e-4, abs=ROUNDING)


def test_gram_without_onednn(monkeypatch):
    x = spectrum(0, (), 150, 100, 0.95).float()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    factors = truncated_svd(x, 20, method="gram")
    assert error(x, factors).item() == pytest.approx(tail(x, 20).item(), rel=1e-4)


def test_gram_under_autocast():
    x = spectrum(0, (), 150, 100, 0.95).float()
    with torch.autocast("cpu", torch.bfloat16):
        factors = truncated_svd(x, 20, method="gram")
    assert error(x, factors).item() == pytest.approx(tail(x, 20).item(), rel=1e-2)


def test_gram_turns_to_float64_where_float32_cannot_tell():
    x = spectrum(0, (), 60, 30, 0.3).float()  # singular value 12 is 5e-7 of the first
    factors = truncated_svd(x, 12, method="gram", dtype=torch.float64)
    assert error(x, factors) <= tail(x, 12) + 1e-6
    assert error(x, factors) <= 2e-6


def test_low_matmul_precision_does_not_reach_the_gram_matrix(monkeypatch):
    x = spectrum(0, (), 60, 30, 0.7).float()
    used = []
    gram = svd._gram
    monkeypatch.setattr(svd, "_gram", lambda x, dtype: used.append(dtype) or gram(x, dtype))
    truncated_svd(x, 5, method="gram")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        truncated_svd(x, 5, method="gram")
    finally:
        torch.set_float32_matmul_precision(before)
    assert used == [torch.float32, torch.float64]


@given(batches, sizes, ranks, methods)
def test_zero_and_empty_matrices(batch, width, rank, method):
    zero = truncated_svd(torch.zeros(*batch, 5, width), rank, method=method)
    assert not zero.left.any()
    gram = zero.right @ zero.right.mT
    torch.testing.assert_close(gram, torch.eye(gram.shape[-1]).expand_as(gram), atol=1e-5, rtol=0)
    empty = truncated_svd(torch.zeros(*batch, 0, width), rank, method=method)
    assert empty.left.shape == (*batch, 0, 0) and empty.right.shape == (*batch, 0, width)


@given(sizes, sizes)
def test_auto_is_what_choose_method_says(tokens, width):
    x = normal(tokens * 31 + width, tokens, width)
    chosen = truncated_svd(x, 3, method=choose_method(tokens, width))
    auto = truncated_svd(x, 3)
    assert torch.equal(auto.left, chosen.left) and torch.equal(auto.right, chosen.right)
    assert choose_method(tokens, width) == ("gram" if tokens >= width else "exact")


@given(sizes, sizes, ranks, methods, seeds)
def test_same_input_same_factors(tokens, width, rank, method, seed):
    x = normal(seed, tokens, width)
    one = truncated_svd(x, rank, method=method)
    torch.rand(3)
    other = truncated_svd(x, rank, method=method)
    assert torch.equal(one.left, other.left) and torch.equal(one.right, other.right)


X = torch.zeros(2, 5, 8)


@pytest.mark.parametrize("method", ["exact", "gram", "randomized"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_raise(plain, method, value):
    x = X.clone()
    x[1, 2, 3] = value
    with pytest.raises(ValueError, match="x must be finite, got values from"):
        truncated_svd(x, 2, method=method)


@pytest.mark.parametrize(
    ("x", "rank", "options", "error", "text"),
    [
        (None, 2, {}, TypeError, "x must be a torch.Tensor, got NoneType"),
        (X[0, 0], 2, {}, ValueError, r"x must have at least 2 dimensions, got shape \(8,\)"),
        (X.int(), 2, {}, TypeError, "x must be of a floating dtype, got torch.int32"),
        (X, 0, {}, ValueError, "rank must be at least 1, got 0"),
        (X, -3, {}, ValueError, "rank must be at least 1, got -3"),
        (X, 2.0, {}, TypeError, "rank must be an int, got 2.0"),
        (X, 2, {"method": "qr"}, ValueError, "method must be one of auto, .*, got 'qr'"),
        (X, 2, {"dtype": torch.int8}, TypeError, "dtype must be a floating dtype, got torch.int8"),
        (X, 2, {"mask": torch.ones(2, 5)}, TypeError, "mask must be of dtype torch.bool"),
        (X, 2, {"mask": X[0] == 0}, ValueError, r"mask must have shape \(2, 5\), got \(5, 8\)"),
    ],
)
def test_errors(plain, x, rank, options, error, text):
    with pytest.raises(error, match=text):
        truncated_svd(x, rank, **options)
