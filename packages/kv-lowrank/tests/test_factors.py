from __future__ import annotations

import math

import pytest
import torch
from common import batches, dtypes, normal, precision, seeds
from hypothesis import given
from hypothesis import strategies as st

from kv_lowrank import (
    LowRank,
    project,
    rows,
    singular_values,
    split_heads,
    subspace_similarity,
    truncated_svd,
)

sizes = st.integers(1, 12)


def picks(seed: int, *shape: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, count, shape, generator=generator)


@given(batches, sizes, sizes, st.integers(1, 5), st.integers(0, 9), dtypes, seeds)
def test_rows_equal_indexing_the_product(batch, tokens, width, rank, count, dtype, seed):
    left = normal(seed, *batch, tokens, rank, dtype=dtype)
    right = normal(seed + 1, *batch, rank, width, dtype=dtype)
    indices = picks(seed, *batch, count, count=tokens)
    unread = torch.ones(*batch, tokens + 1, dtype=torch.bool).scatter_(
        -1, indices % (tokens + 1), 0
    )
    chosen = indices.clamp_min(0)
    got = rows(LowRank(left, right), indices)
    assert got.dtype == dtype
    product = left.double() @ right.double()
    wanted = product.gather(-2, chosen[..., None].expand(*chosen.shape, width))
    wanted = wanted.masked_fill((indices < 0)[..., None], 0.0)
    scale = left.double().norm() * right.double().norm()
    torch.testing.assert_close(got.double(), wanted, atol=precision[dtype] * scale.item(), rtol=0)
    unread[..., 0] = False  # what -1 may touch
    poisoned = left.masked_fill(unread[..., :tokens, None], math.nan)
    assert torch.equal(rows(LowRank(poisoned, right), indices), got)


@given(
    st.integers(1, 3), st.integers(1, 3), sizes, sizes, st.integers(1, 8), st.integers(0, 9), seeds
)
def test_heads_share_the_left_factor_of_a_joint_decomposition(
    batch, heads, tokens, width, rank, count, seed
):
    keys = normal(seed, batch, heads, tokens, width)
    joint = keys.transpose(1, 2).flatten(2)
    whole = truncated_svd(joint, rank)
    factors = split_heads(whole, heads)
    kept = whole.left.shape[-1]
    assert factors.left.shape == (batch, 1, tokens, kept)
    assert factors.right.shape == (batch, heads, kept, width)
    assert factors.right.data_ptr() == whole.right.data_ptr()
    product = (whole.left @ whole.right).unflatten(-1, (heads, width)).transpose(1, 2)
    indices = picks(seed, batch, heads, count, count=tokens)
    wanted = product.gather(2, indices.clamp_min(0)[..., None].expand(-1, -1, -1, width))
    wanted = wanted.masked_fill((indices < 0)[..., None], 0.0)
    torch.testing.assert_close(rows(factors, indices), wanted, atol=1e-5, rtol=1e-5)
    new = normal(seed + 1, batch, heads, 3, width)
    torch.testing.assert_close(
        project(factors, new)[:, 0],
        project(whole, new.transpose(1, 2).flatten(2)),
        atol=1e-5,
        rtol=1e-5,
    )


@given(batches, sizes, sizes, st.integers(1, 8), st.integers(0, 6), seeds)
def test_projection_is_the_nearest_point_of_the_row_space(batch, tokens, width, rank, count, seed):
    factors = truncated_svd(normal(seed, *batch, tokens, width), rank)
    new = normal(seed + 1, *batch, count, width)
    found = project(factors, new)
    assert found.shape == (*batch, count, factors.right.shape[-2])
    basis = factors.right.double()
    rest = new.double() - found.double() @ basis
    # What is left over is orthogonal to the row space, and a second projection changes nothing.
    torch.testing.assert_close(rest @ basis.mT, torch.zeros_like(found).double(), atol=1e-5, rtol=0)
    again = project(factors, found @ factors.right)
    torch.testing.assert_close(again, found, atol=1e-5, rtol=1e-5)


@given(batches, sizes, sizes, st.integers(1, 8), seeds)
def test_projecting_the_factored_rows_gives_the_left_factor(batch, tokens, width, rank, seed):
    x = normal(seed, *batch, tokens, width)
    factors = truncated_svd(x, rank)
    torch.testing.assert_close(project(factors, x), factors.left, atol=1e-4, rtol=1e-4)


@given(batches, sizes, sizes, dtypes, seeds)
def test_singular_values_equal_those_of_the_matrix(batch, tokens, width, dtype, seed):
    x = normal(seed, *batch, tokens, width, dtype=dtype)
    got = singular_values(truncated_svd(x, 99))
    wanted = torch.linalg.svdvals(x.double())
    slack = precision[dtype] * (1 + wanted.max().item())
    torch.testing.assert_close(got.double(), wanted, atol=slack, rtol=0)


@given(batches, st.integers(1, 6), st.integers(0, 6), dtypes, seeds)
def test_similarity_equals_the_inner_product_of_projections(batch, rank, extra, dtype, seed):
    width = rank + extra
    one = normal(seed, *batch, rank, width, dtype=dtype)
    other = normal(seed + 1, *batch, rank, width, dtype=dtype)
    got = subspace_similarity(one, other)

    def projection(basis: torch.Tensor) -> torch.Tensor:
        basis = basis.double()
        return basis.mT @ torch.linalg.pinv(basis.mT)

    wanted = (projection(one) * projection(other)).sum((-2, -1)) / rank
    torch.testing.assert_close(got.double(), wanted, atol=1e-3, rtol=0)
    assert ((got >= 0) & (got <= 1)).all()
    torch.testing.assert_close(got, subspace_similarity(other, one), atol=1e-4, rtol=0)


@given(batches, st.integers(1, 6), st.integers(0, 6), seeds)
def test_similarity_of_the_same_and_of_orthogonal_spaces(batch, rank, extra, seed):
    width = 2 * rank + extra
    frame = torch.linalg.qr(normal(seed, *batch, width, width)).Q
    one, other = frame[..., :rank, :], frame[..., rank : 2 * rank, :]
    mixed = normal(seed + 1, *batch, rank, rank) + 4 * torch.eye(rank)
    ones = torch.ones(batch)
    torch.testing.assert_close(subspace_similarity(one, mixed @ one), ones, atol=1e-4, rtol=0)
    torch.testing.assert_close(subspace_similarity(one, other), 0 * ones, atol=1e-4, rtol=0)


@given(st.integers(1, 400), st.sampled_from([torch.bfloat16, torch.float16]), seeds)
def test_half_precision_accumulates_in_float32(rank, dtype, seed):
    # Terms that cancel: sums kept in half precision would be off by their largest partial sum.
    one, other = normal(seed, 4, rank), normal(seed + 1, rank, 8)
    left = torch.cat((one, -one, 0.01 * one), -1).to(dtype)
    right = torch.cat((other, other, other)).to(dtype)
    exact = left.double() @ right.double()
    partial = left.double().abs() @ right.double().abs()
    slack = exact.abs() * torch.finfo(dtype).eps + partial * 1e-5 + torch.finfo(dtype).tiny
    factors = LowRank(left, right)
    assert ((rows(factors, torch.arange(4)).double() - exact).abs() <= slack).all()
    coordinates = project(LowRank(left.new_zeros(4, 8), right.mT.contiguous()), left)
    assert ((coordinates.double() - exact).abs() <= slack).all()


F = LowRank(torch.zeros(2, 5, 3), torch.zeros(2, 3, 8))
IDS = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("factors", "indices", "error", "text"),
    [
        (F, IDS.int(), TypeError, "indices must be of dtype torch.int64, got torch.int32"),
        (F, IDS[:1], ValueError, r"the leading dimensions of left \(2, 5, 3\), got \(1, 4\)"),
        (F, IDS - 2, ValueError, r"indices must lie within -1 \(none\) and 4, got -2 to -2"),
        (F, IDS + 5, ValueError, r"indices must lie within -1 \(none\) and 4, got 5 to 5"),
        (F, [0], TypeError, "indices must be a torch.Tensor, got list"),
        (F._replace(left=F.left.double()), IDS, ValueError, "of one dtype, got .* torch.float64"),
        (
            F._replace(left=F.left[..., :2]),
            IDS,
            ValueError,
            r"\[\.\.\., T, r\] and \[\.\.\., r, D\]",
        ),
        (F._replace(left=None), IDS, TypeError, "left must be a torch.Tensor, got NoneType"),
        (F._replace(right=F.right.to("meta")), IDS, ValueError, "right must be on cpu like"),
    ],
)
def test_errors_of_rows(plain, factors, indices, error, text):
    with pytest.raises(error, match=text):
        rows(factors, indices)


def test_errors_of_the_others(plain):
    with pytest.raises(ValueError, match=r"width of right \(2, 3, 8\), got \(2, 4, 7\)"):
        project(F, torch.zeros(2, 4, 7))
    with pytest.raises(TypeError, match="new_rows must be of a floating dtype"):
        project(F, IDS)
    with pytest.raises(ValueError, match="heads must divide the width 8, got 3"):
        split_heads(F, 3)
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        split_heads(F, 0)
    with pytest.raises(ValueError, match=r"both be \[\.\.\., r, D\] .* got \(2, 3, 8\) and \(2,"):
        subspace_similarity(F.right, F.right[..., :5])
    with pytest.raises(ValueError, match="one must be finite"):
        subspace_similarity(F.right / 0, F.right)
