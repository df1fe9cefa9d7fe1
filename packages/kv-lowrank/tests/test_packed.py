from __future__ import annotations

import math

import pytest
import torch
from common import normal, seeds
from hypothesis import given
from hypothesis import strategies as st
from test_spans import cuts, pieces, product, ranks, shapes

from kv_lowrank import (
    apply_gates,
    pack_spans,
    packed_rows,
    span_rows,
    span_svd,
    stored_numbers,
    take_spans,
)

FIELDS = ("left", "sigma", "right")
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def factored(seed, shape, max_rank, dtype=torch.float32):
    x = normal(seed, *shape, dtype=dtype)
    x[:, :, : shape[2] // 3] = 1.0  # spans of rank one among them
    return span_svd(x, cuts(seed, shape[0], shape[2]), max_rank)


def picks(seed, packed, count):
    generator = torch.Generator().manual_seed(seed)
    batch, heads, total = packed.ranks.shape
    return torch.randint(-1, total, (batch, heads, count), generator=generator)


@given(shapes, ranks, dtypes, st.sampled_from([0.0, 1.0, 3.0]), seeds)
def test_bytes_are_those_of_the_stored_numbers(shape, max_rank, dtype, threshold, seed):
    spans = factored(seed, shape, max_rank, dtype)
    packed = pack_spans(spans, threshold=threshold)
    numbers = stored_numbers(spans, threshold=threshold)
    assert packed.left.dtype == packed.sigma.dtype == packed.right.dtype == dtype
    held = sum(getattr(packed, name).untyped_storage().nbytes() for name in FIELDS)
    assert held == numbers.sum().item() * dtype.itemsize
    each = packed.ranks * (packed.lengths + shape[3] + 1)
    assert torch.equal(each, numbers)


@given(shapes, ranks, dtypes, seeds)
def test_packing_loses_nothing_but_the_padding(shape, max_rank, dtype, seed):
    spans = factored(seed, shape, max_rank, dtype)
    packed = pack_spans(spans)
    numbers = rows = 0
    for row in range(shape[0]):
        for head in range(shape[1]):
            for k, start, stop in pieces(spans, row):
                rank = packed.ranks[row, head, k].item()
                assert packed.starts[row, head, k] == start
                assert packed.lengths[row, head, k] == stop - start
                size = rank * (stop - start)
                left = packed.left[numbers : numbers + size].view(stop - start, rank)
                assert torch.equal(left, spans.left[row, head, start:stop, :rank])
                sigma = spans.sigma[row, head, k]
                assert torch.equal(packed.sigma[rows : rows + rank], sigma[:rank].to(dtype))
                assert not sigma[rank:].any()
                right = packed.right[rows : rows + rank]
                assert torch.equal(right, spans.right[row, head, k, :rank])
                numbers, rows = numbers + size, rows + rank
    assert numbers == packed.left.numel() and rows == len(packed.right)


@given(shapes, ranks, st.integers(0, 6), seeds)
def test_rows_of_taken_spans_equal_those_of_the_padded_factors(shape, max_rank, count, seed):
    spans = factored(seed, shape, max_rank)
    packed = pack_spans(spans)
    indices = picks(seed, packed, count)
    taken = take_spans(packed, indices)
    values, places = packed_rows(taken)
    wanted, positions = span_rows(spans, indices)
    longest = taken.longest
    assert values.shape == (*indices.shape, longest, shape[3]) and longest <= spans.longest
    assert torch.equal(places, positions[..., :longest])
    assert not (positions[..., longest:] >= 0).any()
    torch.testing.assert_close(values, wanted[..., :longest, :], atol=1e-5, rtol=1e-5)


@given(shapes, ranks, st.integers(0, 4), seeds)
def test_only_chosen_spans_are_read_and_moved(shape, max_rank, count, seed):
    packed = pack_spans(factored(seed, shape, max_rank))
    batch, heads, total = packed.ranks.shape
    indices = picks(seed, packed, count)
    taken = take_spans(packed, indices, device="cpu")
    numbers = rows = 0
    poisoned = packed._replace(**{name: getattr(packed, name).clone() for name in FIELDS})
    for row in range(batch):
        for head in range(heads):
            for k in range(total):
                rank = packed.ranks[row, head, k].item()
                size = rank * packed.lengths[row, head, k].item()
                if k not in indices[row, head]:
                    poisoned.left[numbers : numbers + size] = math.nan
                    poisoned.sigma[rows : rows + rank] = math.nan
                    poisoned.right[rows : rows + rank] = math.nan
                numbers, rows = numbers + size, rows + rank
    again = take_spans(poisoned, indices)
    for one, other in zip(taken, again, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    each = taken.ranks * (taken.lengths + shape[3] + 1)
    assert sum(getattr(taken, name).numel() for name in FIELDS) == each.sum()


@given(shapes, ranks, st.integers(0, 4), seeds)
def test_taking_is_composition_of_indices(shape, max_rank, count, seed):
    packed = pack_spans(factored(seed, shape, max_rank))
    first = picks(seed, packed, count)
    taken = take_spans(packed, first)
    if not count:
        assert taken.ranks.shape == (*first.shape[:2], 0)
        return
    second = picks(seed + 1, taken, 3)
    both = first.gather(2, second.clamp_min(0)).masked_fill(second < 0, -1)
    for one, other in zip(take_spans(taken, second), take_spans(packed, both), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@given(shapes, ranks, seeds)
def test_gated_out_components_are_dropped_wherever_they_stand(shape, max_rank, seed):
    spans = factored(seed, shape, max_rank)
    gates = torch.rand(spans.sigma.shape, generator=torch.Generator().manual_seed(seed))
    gates = gates.where(gates > 0.5, 0.0)
    gated = apply_gates(spans, gates)
    packed = pack_spans(gated)
    assert torch.equal(packed.ranks, (gated.sigma > 0).sum(-1))
    values, places = packed_rows(packed)
    for row in range(shape[0]):
        for head in range(shape[1]):
            for k, start, stop in pieces(spans, row):
                got = values[row, head, k, : stop - start].double()
                wanted = product(gated, row, head, k, start, stop)
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
                assert (places[row, head, k] >= 0).sum() == stop - start


def test_no_spans_no_numbers():
    packed = pack_spans(span_svd(torch.zeros(2, 1, 0, 3), torch.tensor([0]), 2))
    assert packed.left.numel() == packed.sigma.numel() == packed.right.numel() == 0
    indices = torch.full((2, 1, 3), -1)
    values, places = packed_rows(take_spans(packed, indices))
    assert values.shape == (2, 1, 3, 0, 3) and places.shape == (2, 1, 3, 0)


def test_errors(plain):
    spans = span_svd(normal(0, 2, 1, 4, 3), torch.tensor([0, 2, 4]), 2)
    for threshold in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"threshold must not be negative, got {threshold}"):
            pack_spans(spans, threshold=threshold)
    packed = pack_spans(spans)
    zero = torch.zeros(2, 1, 1, dtype=torch.int64)
    for indices, error, text in (
        (zero + 2, ValueError, r"indices must lie within -1 \(none\) and 1, got 2 to 2"),
        (zero - 2, ValueError, r"indices must lie within -1 \(none\) and 1, got -2 to -2"),
        (zero.int(), TypeError, "indices must be of dtype torch.int64, got torch.int32"),
        (zero[:1], ValueError, r"indices must have shape \(2, 1\) \+ \[E\], got \(1, 1, 1\)"),
        (zero.to("meta"), ValueError, "indices must be on cpu like the other tensors, got meta"),
    ):
        with pytest.raises(error, match=text):
            take_spans(packed, indices)
