from __future__ import annotations

import gc
import itertools
import math
import os
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import (
    DEVICES,
    DTYPES,
    TIERS,
    batch_orders,
    cases,
    devices,
    dtypes,
    index_tensors,
    indexed,
    random_rows,
    same_bits,
    seeds,
    shapes,
    tiers,
)

from kv_offload import HitCache, StoreClosedError, TieredStore, storage_bytes


def everything(store) -> torch.Tensor:
    """All rows of a store, through its public gather."""
    batch, heads, length, _ = store.shape
    return store.gather(torch.arange(length).expand(batch, heads, length))


@given(cases())
def test_gather_equals_indexing_on_every_tier(case):
    rows, indices, tier, device = case
    with TieredStore(rows, tier=tier, device=device) as store:
        found = store.gather(indices)
        assert found.device.type == device
        assert same_bits(found, indexed(rows, indices))


@given(cases(), st.permutations(range(3)))
def test_indices_of_any_strides_are_taken(case, order):
    rows, indices, tier, device = case
    strided = indices.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())
    assert torch.equal(strided, indices)
    with TieredStore(rows, tier=tier, device=device) as store:
        assert same_bits(store.gather(strided), indexed(rows, indices))
        out = torch.zeros((*indices.shape, rows.shape[3]), dtype=rows.dtype, device=device)
        assert same_bits(store.gather(strided, out=out), indexed(rows, indices))
        assert same_bits(HitCache(store, 8).fetch(strided), indexed(rows, indices))
        if tier == "device":
            assert same_bits(store._buffer._gather_masked(strided, None), indexed(rows, indices))


@given(shapes, dtypes, dtypes, seeds, tiers, st.data())
def test_keys_and_values_side_by_side_come_with_one_gather(shape, one, other, seed, tier, data):
    # As bytes where their dtypes differ; rows of a multiple of 8 elements are aligned for all.
    shape = (*shape[:3], 8)
    keys, values = random_rows(shape, one, seed), random_rows(shape, other, seed + 1)
    parts = [(rows if one == other else rows.view(torch.uint8)) for rows in (keys, values)]
    with TieredStore(torch.cat(parts, dim=-1), tier=tier) as store:
        indices = data.draw(index_tensors(*shape[:3]))
        for found in (store.gather(indices), HitCache(store, 8).fetch(indices)):
            k, v = found.split([part.shape[3] for part in parts], dim=-1)
            assert same_bits(k.view(one), indexed(keys, indices))
            assert same_bits(v.view(other), indexed(values, indices))


@given(cases(), st.booleans(), seeds)
def test_gather_into_out_leaves_skipped_rows_alone(case, contiguous, seed):
    rows, indices, tier, device = case
    shape = (*indices.shape, rows.shape[3])
    before = random_rows(shape, rows.dtype, seed)
    out = before.to(device)
    if not contiguous:
        out = torch.empty((*shape[:3], 2 * shape[3]), dtype=rows.dtype, device=device)[..., ::2]
        out.copy_(before)
    with TieredStore(rows, tier=tier, device=device) as store:
        assert store.gather(indices, out=out) is out
    assert same_bits(out, indexed(rows, indices, start=before))


@given(cases(), st.booleans())
def test_gather_async_gives_the_rows_of_gather(case, given_out):
    rows, indices, tier, device = case
    shape = (*indices.shape, rows.shape[3])
    out = torch.zeros(shape, dtype=rows.dtype, device=device) if given_out else None
    with TieredStore(rows, tier=tier, device=device) as store:
        pending = store.gather_async(indices, out=out)
        first, second = pending.wait(), pending.wait()
        assert first is second
        assert same_bits(first, indexed(rows, indices))
        assert out is None or first.data_ptr() == out.data_ptr()


@given(cases(), seeds)
def test_masked_gather_equals_indexing(case, seed):
    # The path of rows held on a CUDA device, here on the CPU.
    rows, indices, _, _ = case
    start = random_rows((*indices.shape, rows.shape[3]), rows.dtype, seed)
    with TieredStore(rows) as store:
        fresh = store._buffer._gather_masked(indices, None)
        given_out = store._buffer._gather_masked(indices, start.clone())
    assert same_bits(fresh, indexed(rows, indices))
    assert same_bits(given_out, indexed(rows, indices, start=start))


@given(shapes, dtypes, seeds, tiers, st.lists(st.integers(0, 9), max_size=5))
def test_rows_appended_in_any_pieces_are_the_whole(shape, dtype, seed, tier, cuts):
    rows = random_rows(shape, dtype, seed)
    bounds = [0, *sorted(min(cut, shape[2]) for cut in cuts), shape[2]]
    with TieredStore(rows[:, :, : bounds[1]], tier=tier) as store:
        for begin, end in itertools.pairwise(bounds[1:]):
            store.append(rows[:, :, begin:end])
        assert store.shape == rows.shape
        assert same_bits(everything(store), rows)


@given(st.integers(0, 5), st.integers(1, 80), st.sampled_from(["device", "host"]))
def test_appending_one_by_one_moves_to_new_storage_log_n_times(start, steps, tier):
    row_bytes = 2 * 4 * 4
    with TieredStore(torch.zeros(1, 2, start, 4), tier=tier) as store:
        sizes = [store.nbytes[tier]]
        for _ in range(steps):
            store.append(torch.ones(1, 2, 1, 4))
            sizes.append(store.nbytes[tier])
    assert len(set(sizes)) <= 3 + math.log2(start + steps)
    assert sizes[-1] <= 2 * (start + steps) * row_bytes


@given(shapes, dtypes, seeds, st.lists(tiers, min_size=1, max_size=5))
def test_moving_between_tiers_keeps_every_bit(shape, dtype, seed, route):
    rows = random_rows(shape, dtype, seed)
    with TieredStore(rows) as store:
        for tier in route:
            store.to_tier(tier)
            assert store.tier == tier
            assert same_bits(everything(store), rows)


@given(shapes, dtypes, seeds, tiers, st.data())
def test_select_rows_equals_indexing_the_batch(shape, dtype, seed, tier, data):
    rows = random_rows(shape, dtype, seed)
    order = data.draw(batch_orders(shape[0], st.integers(0, 5)))
    with TieredStore(rows, tier=tier) as store:
        store.select_rows(order)
        assert same_bits(everything(store), rows[order])


@given(shapes, dtypes, seeds, tiers, st.data())
def test_rows_after_truncate_are_those_appended_after_it(shape, dtype, seed, tier, data):
    rows, later = random_rows(shape, dtype, seed), random_rows(shape, dtype, seed + 1)
    n = data.draw(st.integers(0, shape[2]))
    with TieredStore(rows, tier=tier) as store:
        store.truncate(n)
        assert same_bits(everything(store), rows[:, :, :n])
        store.append(later)
        assert same_bits(everything(store), torch.cat([rows[:, :, :n], later], 2))


@given(shapes, dtypes, seeds, tiers, st.integers(0, 9))
def test_nbytes_is_what_the_storages_hold(shape, dtype, seed, tier, extra):
    rows = random_rows(shape, dtype, seed)
    with TieredStore(rows, tier=tier) as store:
        exact = rows.numel() * dtype.itemsize
        assert store.nbytes == {name: exact * (name == tier) for name in TIERS}
        store.append(random_rows((*shape[:2], extra, shape[3]), dtype, seed))
        held = store.nbytes[tier]
        assert held == store._buffer.rows.untyped_storage().nbytes()
        assert held >= store.shape.numel() * dtype.itemsize
        if tier == "disk":
            size = os.path.getsize(store._buffer.file.path)
            header = int.from_bytes(store._buffer.file.path.read_bytes()[:8], "little")
            assert size == 8 + header + held


@given(st.lists(st.integers(0, 20), max_size=4), st.integers(1, 3))
def test_storage_bytes_counts_each_storage_once(sizes, views):
    bases = [torch.zeros(size, dtype=torch.int16) for size in sizes]
    tensors = [base[index:] for base in bases for index in range(views)]
    assert storage_bytes(*tensors) == 2 * sum(sizes)


def test_storage_bytes_of_mapped_overlapping_and_meta_tensors():
    memory = bytearray(64)
    whole, part = (torch.frombuffer(memory, dtype=torch.uint8, count=n) for n in (64, 16))
    assert storage_bytes(whole, part) == storage_bytes(part, whole) == 64
    assert storage_bytes(torch.empty(4, device="meta"), torch.empty(8, device="meta")) == 0


@given(shapes, dtypes, seeds, tiers)
def test_the_callers_tensor_is_neither_shared_nor_kept(shape, dtype, seed, tier):
    rows, expected = random_rows(shape, dtype, seed), random_rows(shape, dtype, seed)
    with TieredStore(rows, tier=tier) as store:
        rows.zero_()
        assert same_bits(everything(store), expected)
        alive = weakref.ref(rows)
        del rows
        assert alive() is None


@given(shapes, dtypes, seeds, tiers, st.data())
def test_results_do_not_share_memory_with_the_store(shape, dtype, seed, tier, data):
    rows = random_rows(shape, dtype, seed)
    indices = data.draw(index_tensors(*shape[:3]))
    with TieredStore(rows, tier=tier) as store:
        store.gather(indices).zero_()
        assert same_bits(everything(store), rows)


@given(tiers, st.permutations([(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 2, 1)]), seeds)
def test_strided_and_expanded_sources_are_stored_as_they_read(tier, orders, seed):
    rows = random_rows((2, 3, 4, 5), torch.float32, seed).permute(*orders[0])
    wide = rows[:, :1].expand(-1, 3, -1, -1)
    for source in (rows, wide, rows[:, :, ::2]):
        with TieredStore(source, tier=tier) as store:
            assert same_bits(everything(store), source)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_tier_keeps_the_dtype(dtype, device):
    rows = random_rows((1, 2, 3, 4), dtype, 0)
    for tier in TIERS:
        with TieredStore(rows, tier=tier, device=device) as store:
            assert store.dtype == dtype
            assert store.gather(torch.zeros(1, 2, 1, dtype=torch.int64)).dtype == dtype


@pytest.mark.parametrize("tier", TIERS)
def test_a_store_made_in_inference_mode_can_grow_outside_it(tier):
    with torch.inference_mode():
        store = TieredStore(torch.ones(1, 1, 2, 2), tier=tier)
        store.append(torch.ones(1, 1, 1, 2))
    store.append(torch.ones(1, 1, 1, 2, requires_grad=True))
    rows = store.gather(torch.arange(4).view(1, 1, 4))
    assert not rows.requires_grad and rows.sum() == 8
    store.close()


def test_scratch_files_come_and_go_with_the_disk_tier(tmp_path):
    path = tmp_path / "rows.safetensors"
    store = TieredStore(torch.ones(2, 1, 3, 2), tier="host", path=path)
    assert os.listdir(tmp_path) == []
    store.to_tier("disk")
    store.append(torch.ones(2, 1, 4, 2))
    store.select_rows(torch.tensor([1, 0, 0]))
    assert os.listdir(tmp_path) == ["rows.safetensors"]
    store.to_tier("device")
    assert os.listdir(tmp_path) == []
    store.to_tier("disk")
    store.close()
    assert os.listdir(tmp_path) == []


def test_a_scratch_file_goes_with_a_forgotten_store(tmp_path):
    store = TieredStore(torch.ones(1, 1, 3, 2), tier="disk", path=tmp_path / "rows")
    store.append(torch.ones(1, 1, 3, 2))
    assert os.listdir(tmp_path) == ["rows"]
    del store
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_the_scratch_file_is_safetensors(tmp_path):
    from safetensors.torch import load_file

    rows = random_rows((2, 2, 3, 4), torch.bfloat16, 1)
    with TieredStore(rows, tier="disk", path=tmp_path / "rows"):
        assert same_bits(load_file(tmp_path / "rows")["rows"].view(rows.shape), rows)


def test_closing_twice_is_fine_and_repr_still_works():
    store = TieredStore(torch.ones(1, 1, 3, 2), tier="host")
    assert repr(store) == "TieredStore((1, 1, 3, 2), torch.float32, tier='host', device='cpu')"
    store.close()
    store.close()
    assert store.closed and repr(store) == "TieredStore(closed)"
    with pytest.raises(StoreClosedError):
        store.gather(torch.zeros(1, 1, 1, dtype=torch.int64))


@given(devices, tiers)
def test_rows_go_to_the_device_asked_for(device, tier):
    with TieredStore(torch.ones(1, 1, 1, 1), tier=tier, device=device) as store:
        assert store.device.type == device
        assert store.gather(torch.zeros(1, 1, 1, dtype=torch.int64)).device == store.device


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_rows_cross_to_another_device(tier, skipped):
    # Rows on "meta" have no values, but they do cross, on every machine.
    indices = torch.arange(3).sub(skipped).expand(2, 2, 3)
    with TieredStore(torch.ones(2, 2, 5, 4).bfloat16(), tier=tier, device="meta") as store:
        out = torch.empty(2, 2, 3, 4, dtype=torch.bfloat16, device="meta")
        for rows in (store.gather(indices), store.gather_async(indices, out=out).wait()):
            assert (rows.device.type, rows.shape, rows.dtype) == ("meta", out.shape, out.dtype)
        assert store.nbytes[tier] == 2 * 2 * 5 * 4 * 2
