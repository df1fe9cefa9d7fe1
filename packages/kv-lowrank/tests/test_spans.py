from __future__ import annotations

import math

import pytest
import torch
from common import dtypes, normal, precision, seeds, spectrum
from hypothesis import given
from hypothesis import strategies as st

from kv_lowrank import (
    apply_gates,
    effective_rank,
    gated_error,
    rank_for_energy,
    span_rows,
    span_svd,
    stored_numbers,
)
from kv_lowrank import spans as spans_module

shapes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 40), st.integers(1, 8))
ranks = st.integers(1, 10)


def cuts(seed: int, batch: int, tokens: int) -> torch.Tensor:
    """Offsets for all rows, or ragged ones that leave out tokens; some spans are empty."""
    generator = torch.Generator().manual_seed(seed)
    if seed % 2:
        return torch.randint(0, tokens + 1, (batch, 5), generator=generator).sort(-1).values
    count = int(torch.randint(0, 5, (1,), generator=generator))
    inner = torch.randint(0, tokens + 1, (count,), generator=generator).sort().values
    return torch.cat((torch.tensor([0]), inner, torch.tensor([tokens])))


def pieces(spans, row):
    bounds = spans.offsets[row].tolist()
    return [(k, bounds[k], bounds[k + 1]) for k in range(len(bounds) - 1)]


def product(spans, row, head, k, start, stop):
    left = spans.left[row, head, start:stop].double()
    return left * spans.sigma[row, head, k].double() @ spans.right[row, head, k].double()


@given(shapes, ranks, dtypes, seeds)
def test_every_span_is_the_best_approximation_of_its_rank(shape, max_rank, dtype, seed):
    batch, heads, tokens, _ = shape
    x = normal(seed, *shape, dtype=dtype)
    spans = span_svd(x, cuts(seed, batch, tokens), max_rank, dtype=torch.float64)
    for row in range(batch):
        for k, start, stop in pieces(spans, row):
            for head in range(heads):
                part = x[row, head, start:stop].double()
                sigma = torch.linalg.svdvals(part)
                kept = min(max_rank, len(sigma))
                got = spans.sigma[row, head, k].double()
                torch.testing.assert_close(got[:kept], sigma[:kept], atol=1e-5, rtol=1e-5)
                assert not got[kept:].any()
                rest = part - product(spans, row, head, k, start, stop)
                best = sigma[kept:].square().sum().sqrt()
                torch.testing.assert_close(rest.norm(), best, atol=1e-5, rtol=1e-5)


@given(shapes, ranks, seeds)
def test_both_bases_are_orthonormal_up_to_the_rank(shape, max_rank, seed):
    batch, heads, tokens, _ = shape
    spans = span_svd(normal(seed, *shape), cuts(seed, batch, tokens), max_rank)
    for row in range(batch):
        for k, start, stop in pieces(spans, row):
            for head in range(heads):
                some = (spans.sigma[row, head, k] > 0).float().diag()
                right = spans.right[row, head, k]
                torch.testing.assert_close(right @ right.mT, some, atol=1e-5, rtol=0)
                left = spans.left[row, head, start:stop]
                torch.testing.assert_close(left.mT @ left, some, atol=1e-5, rtol=0)


@given(shapes, dtypes, seeds)
def test_exact_at_full_rank_and_nothing_outside_is_read(shape, dtype, seed):
    batch, heads, tokens, width = shape
    x = normal(seed, *shape, dtype=dtype)
    offsets = cuts(2 * seed + 1, batch, tokens)
    token = torch.arange(tokens)
    inside = (token >= offsets[:, :1]) & (token < offsets[:, -1:])
    x = x.masked_fill(~inside[:, None, :, None], math.nan)
    spans = span_svd(x, offsets, width)
    assert spans.left.dtype == spans.right.dtype == dtype and spans.sigma.dtype == torch.float32
    count = offsets.shape[1] - 1
    indices = torch.arange(count).expand(batch, heads, count)
    values, places = span_rows(spans, indices)
    rebuilt = torch.full_like(x, math.nan)
    for row in range(batch):
        for head in range(heads):
            real = places[row, head] >= 0
            where = places[row, head][real]
            assert where.tolist() == token[inside[row]].tolist()
            rebuilt[row, head, where] = values[row, head][real]
            assert not values[row, head][~real].any()
    slack = 4 * precision[dtype] * (1 + x.nan_to_num().double().abs().max().item() if tokens else 1)
    torch.testing.assert_close(rebuilt, x, atol=slack * 3, rtol=0, equal_nan=True)


@given(shapes, ranks, st.integers(0, 6), seeds)
def test_span_rows_equal_the_product_and_skip_missing_spans(shape, max_rank, count, seed):
    batch, heads, tokens, width = shape
    spans = span_svd(normal(seed, *shape), cuts(seed, batch, tokens), max_rank)
    total = spans.offsets.shape[1] - 1
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, total, (batch, heads, count), generator=generator)
    values, places = span_rows(spans, indices)
    assert values.shape == (batch, heads, count, spans.longest, width)
    for row in range(batch):
        bounds = [*pieces(spans, row), (-1, 0, 0)]
        for head in range(heads):
            for slot, k in enumerate(indices[row, head].tolist()):
                _, start, stop = bounds[k]
                length = stop - start
                assert places[row, head, slot].tolist() == list(range(start, stop)) + [-1] * (
                    spans.longest - length
                )
                assert not values[row, head, slot, length:].any()
                if length:
                    wanted = product(spans, row, head, k, start, stop)
                    torch.testing.assert_close(
                        values[row, head, slot, :length].double(), wanted, atol=1e-5, rtol=1e-5
                    )


@given(shapes, ranks, seeds)
def test_gated_error_is_the_sum_of_what_the_gates_take(shape, max_rank, seed):
    batch, heads, tokens, _ = shape
    spans = span_svd(normal(seed, *shape), cuts(seed, batch, tokens), max_rank, dtype=torch.float64)
    gates = torch.rand(spans.sigma.shape, generator=torch.Generator().manual_seed(seed))
    gated = apply_gates(spans, gates)
    wanted = gated_error(spans.sigma, gates)
    for row in range(batch):
        for k, start, stop in pieces(spans, row):
            for head in range(heads):
                lost = product(spans, row, head, k, start, stop)
                lost = lost - product(gated, row, head, k, start, stop)
                assert lost.square().sum().item() == pytest.approx(
                    wanted[row, head, k].item(), rel=1e-4, abs=1e-8
                )


@given(shapes, ranks, st.integers(0, 4), seeds)
def test_stored_numbers_count_kept_components(shape, max_rank, true_rank, seed):
    batch, heads, tokens, width = shape
    x = normal(seed, batch, heads, tokens, true_rank) @ normal(
        seed + 1, batch, heads, true_rank, width
    )
    spans = span_svd(x, cuts(seed, batch, tokens), max_rank)
    stored = stored_numbers(spans)
    cut = stored_numbers(spans, threshold=1.0)
    for row in range(batch):
        for k, start, stop in pieces(spans, row):
            for head in range(heads):
                sigma = spans.sigma[row, head, k].tolist()
                size = (stop - start) + width + 1
                kept = sum(value > 0 for value in sigma)
                assert kept <= min(true_rank, stop - start, width, max_rank)
                assert stored[row, head, k].item() == kept * size
                assert cut[row, head, k].item() == sum(value > 1 for value in sigma) * size


@given(st.integers(4, 24), st.integers(4, 12), st.floats(0.05, 0.99), st.booleans(), seeds)
def test_bases_stay_orthonormal_however_fast_the_spectrum_falls(tokens, width, decay, tall, seed):
    # Spans of falling and of flat spectrum in one call.
    steep = spectrum(seed, (), tokens, width, decay).float()
    flat = spectrum(seed + 1, (), tokens, width, 0.99).float()
    x = torch.cat((steep, flat, steep))[None, None]
    if tall:
        x = x.repeat_interleave(4, 2)
    step = x.shape[2] // 3
    spans = span_svd(x, torch.arange(4) * step, width)
    for k in range(3):
        part = x[0, 0, k * step : (k + 1) * step].double()
        sigma = torch.linalg.svdvals(part)
        got = spans.sigma[0, 0, k].double()
        some = got > 0
        wanted = sigma.where(sigma > 1e-6 * sigma[0], 0.0)
        torch.testing.assert_close(got, wanted, atol=3e-6 * sigma[0].item(), rtol=0)
        right, left = spans.right[0, 0, k], spans.left[0, 0, k * step : (k + 1) * step]
        torch.testing.assert_close(right @ right.mT, some.float().diag(), atol=1e-5, rtol=0)
        torch.testing.assert_close(left.mT @ left, some.float().diag(), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            product(spans, 0, 0, k, k * step, (k + 1) * step), part, atol=1e-5, rtol=0
        )


halves = st.sampled_from([torch.bfloat16, torch.float16])


@given(st.integers(4, 40), st.integers(4, 12), st.floats(0.05, 0.99), ranks, halves, seeds)
def test_half_precision_loses_its_own_rounding_only(tokens, width, decay, max_rank, dtype, seed):
    # Spans of falling and of flat spectrum, of rank one and of zeros in one call.
    steep = spectrum(seed, (), tokens, width, decay)
    flat = spectrum(seed + 1, (), tokens, width, 0.99)
    x = torch.cat((steep, flat, flat[:1].expand(tokens, -1), torch.zeros(tokens, width)))
    x = x.to(dtype)[None, None]
    spans = span_svd(x, torch.arange(5) * tokens, max_rank)
    for k in range(4):
        start, stop = k * tokens, (k + 1) * tokens
        part = x[0, 0, start:stop].double()
        sigma = torch.linalg.svdvals(part)
        kept = min(max_rank, len(sigma))
        slack = 4 * torch.finfo(dtype).eps * sigma[0].item()
        torch.testing.assert_close(
            spans.sigma[0, 0, k, :kept].double(), sigma[:kept], atol=slack, rtol=0
        )
        rest = part - product(spans, 0, 0, k, start, stop)
        best = sigma[kept:].square().sum().sqrt()
        assert rest.norm() <= best + slack
    assert (spans.sigma[0, 0, 2] > 0).sum() == 1 and not spans.sigma[0, 0, 3].any()


@given(shapes, ranks, st.integers(1, 60), seeds)
def test_slabs_do_not_change_the_spans(shape, max_rank, slab, seed):
    x, offsets = normal(seed, *shape), cuts(seed, shape[0], shape[2])
    whole = span_svd(x, offsets, max_rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans_module, "_SLAB", slab)
        parts = span_svd(x, offsets, max_rank)
    torch.testing.assert_close(parts.sigma, whole.sigma, atol=1e-5, rtol=1e-5)
    indices = torch.arange(offsets.shape[-1] - 1).expand(*shape[:2], -1)
    one, other = (span_rows(each, indices)[0] for each in (whole, parts))
    lost = [each.square().sum((-2, -1)) for each in (one, other)]
    torch.testing.assert_close(*lost, atol=1e-4, rtol=1e-4)


@given(shapes, ranks, st.integers(2, 4), seeds)
def test_threads_do_not_change_the_spans(shape, max_rank, threads, seed):
    batch, _, tokens, _ = shape
    x, offsets = normal(seed, *shape), cuts(seed, batch, tokens)
    expected = span_svd(x, offsets, max_rank)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            got = span_svd(x, offsets, max_rank)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, other in zip(got[:4], expected[:4], strict=True):
        assert torch.equal(one, other)


@given(st.integers(1, 200), st.integers(1, 3), seeds)
def test_zero_and_constant_spans(tokens, width, seed):
    spans = span_svd(torch.zeros(1, 1, tokens, width), torch.tensor([0, tokens]), 4)
    assert not spans.left.any() and not spans.sigma.any() and not spans.right.any()
    row = normal(seed, width)
    spans = span_svd(row.expand(1, 1, tokens, width), torch.tensor([0, tokens]), 4)
    assert (spans.sigma[0, 0, 0] > 0).sum() == 1
    values, _ = span_rows(spans, torch.zeros(1, 1, 1, dtype=torch.int64))
    torch.testing.assert_close(values[0, 0, 0], row.expand(tokens, width), atol=1e-5, rtol=1e-5)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10), st.floats(0.001, 1))
def test_rank_for_energy_is_the_smallest_that_suffices(values, energy):
    sigma = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    rank = rank_for_energy(sigma, energy).item()
    squares = [value * value for value in sigma.tolist()]
    total = math.fsum(squares)
    kept = [math.fsum(squares[:r]) for r in range(len(squares) + 1)]
    assert kept[rank] >= energy * total * (1 - 1e-12)
    if rank:
        assert kept[rank - 1] < energy * total * (1 + 1e-12)
    assert rank_for_energy(sigma, 1.0).item() == sum(square > 0 for square in squares)


@given(st.integers(1, 4), st.integers(1, 8), seeds)
def test_effective_rank_counts_open_gates_and_passes_gradients(batch, rank, seed):
    gates = torch.rand(batch, rank, generator=torch.Generator().manual_seed(seed))
    gates.requires_grad_()
    total = effective_rank(gates)
    assert ((total >= 0) & (total <= rank)).all()
    assert torch.equal(effective_rank((gates > 0.5).float()), (gates > 0.5).sum(-1).float())
    sigma = normal(seed, batch, rank).abs()
    (total.sum() + gated_error(sigma, gates).sum()).backward()
    wanted = 1 - 2 * (1 - gates.detach()) * sigma.square()
    torch.testing.assert_close(gates.grad, wanted)


X, OFFSETS = torch.zeros(2, 1, 4, 3), torch.tensor([0, 2, 4])


@pytest.mark.parametrize(
    ("x", "offsets", "rank", "error", "text"),
    [
        (X[0], OFFSETS, 2, ValueError, r"x must have 4 dimensions, got shape \(1, 4, 3\)"),
        (X, OFFSETS.int(), 2, TypeError, "offsets must be of dtype torch.int64, got torch.int32"),
        (X, OFFSETS[None, None], 2, ValueError, r"offsets must have shape \[S\+1\] or \[B, S\+1\]"),
        (X, OFFSETS.expand(3, 3), 2, ValueError, "offsets must have 2 rows"),
        (X, OFFSETS.flip(0), 2, ValueError, "offsets must never fall"),
        (X, OFFSETS + 1, 2, ValueError, "offsets must lie within 0 and T = 4, got 1 to 5"),
        (X, OFFSETS[:2], 2, ValueError, "offsets must begin at 0 and end at T = 4, got 0 to 2"),
        (X, OFFSETS, 0, ValueError, "max_rank must be at least 1, got 0"),
        (X, OFFSETS, -2, ValueError, "max_rank must be at least 1, got -2"),
        (X / 0, OFFSETS, 2, ValueError, "x must be finite, got values from nan"),
        (X, OFFSETS.to("meta"), 2, ValueError, "offsets must be on cpu like"),
    ],
)
def test_errors_of_span_svd(plain, x, offsets, rank, error, text):
    with pytest.raises(error, match=text):
        span_svd(x, offsets, rank)


def test_errors_of_the_others(plain):
    spans = span_svd(X, OFFSETS, 2)
    with pytest.raises(TypeError, match=r"dtype must be a floating dtype, got torch\.int8"):
        span_svd(X, OFFSETS, 2, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"the shape of sigma \(2, 1, 2, 2\), got \(2, 1, 2, 3\)"):
        apply_gates(spans, torch.zeros(2, 1, 2, 3))
    with pytest.raises(ValueError, match=r"within -1 \(none\) and 1, got 2 to 2"):
        span_rows(spans, torch.full((2, 1, 1), 2))
    with pytest.raises(ValueError, match=r"indices must have shape \(2, 1\) \+ \[E\], got \(1, 1,"):
        span_rows(spans, torch.zeros(1, 1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="threshold must not be negative, got -1"):
        stored_numbers(spans, threshold=-1)
    for energy in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"energy must lie within .*, got {energy}"):
            rank_for_energy(torch.ones(3), energy)
    for sigma in ([1.0, 2.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="sigma must be falling and not negative"):
            rank_for_energy(torch.tensor(sigma), 0.5)
    with pytest.raises(ValueError, match="sigma must be finite"):
        rank_for_energy(torch.tensor([math.nan]), 0.5)
    for gates in ([1.5, 0.0], [math.nan, 0.0]):
        with pytest.raises(ValueError, match=r"gates must lie within \[0, 1\], got"):
            effective_rank(torch.tensor(gates))
    with pytest.raises(ValueError, match=r"the shape of sigma \(3,\), got \(2,\)"):
        gated_error(torch.ones(3), torch.ones(2))
