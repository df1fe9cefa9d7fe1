from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import (
    batch_orders,
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
from torch.utils._python_dispatch import TorchDispatchMode

from kv_offload import HitCache, StoreClosedError, TieredStore


@st.composite
def traces(draw):
    """(rows, selections): several selections of changing length over the same rows."""
    shape = draw(shapes)
    rows = random_rows(shape, draw(dtypes), draw(seeds))
    ordered = draw(st.sampled_from([True, None]))
    one = index_tensors(*shape[:3], ordered=ordered)
    return rows, draw(st.lists(one, min_size=1, max_size=6))


def count_misses(selections) -> tuple[int, int]:
    """(requested, misses) of a cache that holds exactly the last selection, with Python sets."""
    resident, requested, misses = {}, 0, 0
    for indices in selections:
        now = {}
        for b in range(indices.shape[0]):
            for h in range(indices.shape[1]):
                ids = [index for index in indices[b, h].tolist() if index >= 0]
                requested += len(ids)
                misses += sum(index not in resident.get((b, h), ()) for index in ids)
                now[b, h] = set(ids)
        resident = now
    return requested, misses


@given(traces(), tiers, devices)
def test_fetch_equals_indexing_whatever_was_fetched_before(trace, tier, device):
    rows, selections = trace
    with TieredStore(rows, tier=tier, device=device) as store:
        cache = HitCache(store, 8)
        for indices in selections:
            assert same_bits(cache.fetch(indices), indexed(rows, indices))


@given(traces())
def test_hits_and_misses_are_those_of_sets(trace):
    rows, selections = trace
    cache = HitCache(TieredStore(rows), 8)
    for indices in selections:
        cache.fetch(indices)
    requested, misses = count_misses(selections)
    assert (cache.misses, cache.hits + cache.misses) == (misses, requested)
    assert cache.bytes_moved == misses * rows.shape[3] * rows.dtype.itemsize


@given(traces())
def test_results_stay_as_they_were_through_later_fetches(trace):
    rows, selections = trace
    cache = HitCache(TieredStore(rows), 8)
    results = [cache.fetch(indices) for indices in selections]
    for indices, result in zip(selections, results, strict=True):
        assert same_bits(result, indexed(rows, indices))


@given(traces())
def test_resident_bytes_are_those_of_the_last_result_and_its_ids(trace):
    rows, selections = trace
    cache = HitCache(TieredStore(rows), 8)
    assert cache.nbytes == 0
    for indices in selections:
        result = cache.fetch(indices)
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
        ids = cache.nbytes - result.untyped_storage().nbytes()
        assert ids in [indices.numel() * 8 * copies for copies in (1, 2, 3)]


@given(traces())
def test_fetching_the_same_again_moves_nothing(trace):
    rows, selections = trace
    cache = HitCache(TieredStore(rows), 8)
    for indices in selections:
        cache.fetch(indices)
        misses, hits = cache.misses, cache.hits
        assert same_bits(cache.fetch(indices.clone()), indexed(rows, indices))
        assert cache.misses == misses
        assert cache.hits == hits + int((indices >= 0).sum())


@given(traces(), tiers)
def test_a_prefetched_selection_is_all_hits(trace, tier):
    rows, selections = trace
    with TieredStore(rows, tier=tier) as store:
        cache = HitCache(store, 8)
        for indices in selections:
            cache.prefetch(indices)
            assert same_bits(cache.fetch(indices), indexed(rows, indices))
        requested, moved = count_misses(selections)
        assert (cache.misses, cache.prefetched, cache.hits) == (0, moved, requested)
        assert cache.bytes_moved == moved * rows.shape[3] * rows.dtype.itemsize


@given(traces(), st.data())
def test_a_wrong_guess_never_changes_the_rows(trace, data):
    rows, selections = trace
    cache = HitCache(TieredStore(rows), 8)
    for indices in selections:
        cache.prefetch(data.draw(index_tensors(*rows.shape[:3])))
        assert same_bits(cache.fetch(indices), indexed(rows, indices))


@given(traces(), st.data())
def test_resident_rows_follow_the_batch_rows_of_the_store(trace, data):
    rows, selections = trace
    store = TieredStore(rows)
    cache = HitCache(store, 8)
    for indices in selections:
        cache.fetch(indices)
        order = data.draw(batch_orders(rows.shape[0], st.just(rows.shape[0])))
        store.select_rows(order)
        cache.select_rows(order)
        rows = rows[order]
        misses = cache.misses
        moved = indices[order]
        assert same_bits(cache.fetch(moved), indexed(rows, moved))
        assert cache.misses == misses


@given(traces(), st.data())
def test_a_selection_from_before_a_reordering_is_not_taken_for_resident(trace, data):
    rows, selections = trace
    store = TieredStore(rows)
    cache = HitCache(store, 8)
    for indices in selections:
        cache.fetch(indices)
        order = data.draw(batch_orders(rows.shape[0], st.just(rows.shape[0])))
        store.select_rows(order)
        rows = rows[order]
        assert same_bits(cache.fetch(indices), indexed(rows, indices))


@given(traces(), st.data(), seeds)
def test_ids_that_come_back_after_truncate_are_fetched_anew(trace, data, seed):
    rows, selections = trace
    store = TieredStore(rows)
    cache = HitCache(store, 8)
    for step, indices in enumerate(selections):
        cache.fetch(indices)
        n = data.draw(st.integers(0, rows.shape[2]))
        later = random_rows((*rows.shape[:2], rows.shape[2] - n, rows.shape[3]), rows.dtype, step)
        store.truncate(n)
        kept = torch.where(indices < n, indices, -1)
        misses = cache.misses
        if data.draw(st.booleans()):
            assert same_bits(cache.fetch(kept), indexed(rows, kept))
            assert cache.misses == misses
        store.append(later)
        rows = torch.cat([rows[:, :, :n], later], 2)
        assert same_bits(cache.fetch(indices), indexed(rows, indices))
        assert cache.misses == misses + int((indices >= n).sum())


@given(traces(), st.data())
def test_a_refused_fetch_changes_nothing(trace, data):
    rows, selections = trace
    store = TieredStore(rows)
    cache = HitCache(store, 8)
    for indices in selections:
        cache.fetch(indices)
    before = cache.hits, cache.misses, cache.bytes_moved, cache.nbytes
    bad = data.draw(st.sampled_from([-2, rows.shape[2], 2**63 - 1, 2**63 - 2, -(2**63)]))
    batch, heads, _, _ = rows.shape
    for wrong in (torch.full((batch, heads, 2), bad), torch.full((batch, heads, 9), -1)):
        if wrong.numel() or wrong.shape[2] > 8:
            with pytest.raises(ValueError):
                cache.fetch(wrong)
    assert before == (cache.hits, cache.misses, cache.bytes_moved, cache.nbytes)
    misses = cache.misses
    assert same_bits(cache.fetch(selections[-1]), indexed(rows, selections[-1]))
    assert cache.misses == misses


@given(traces())
def test_the_callers_indices_are_neither_changed_nor_kept(trace):
    rows, selections = trace
    cache = HitCache(TieredStore(rows), 8)
    for indices in selections:
        given_ids = indices.clone()
        cache.fetch(given_ids)
        assert torch.equal(given_ids, indices)
        given_ids.fill_(-1)
        assert same_bits(cache.fetch(indices), indexed(rows, indices))


@given(traces(), tiers)
def test_a_cache_lives_through_a_change_of_tier(trace, tier):
    rows, selections = trace
    with TieredStore(rows) as store:
        cache = HitCache(store, 8)
        for indices in selections:
            cache.fetch(indices)
            store.to_tier(tier)
            misses = cache.misses
            assert same_bits(cache.fetch(indices), indexed(rows, indices))
            assert cache.misses == misses


def test_a_trace_with_60_percent_repetition_moves_at_most_42_percent():
    torch.manual_seed(0)
    length, count, steps = 4096, 200, 60
    rows = torch.randn(1, 4, length, 16)
    chosen = torch.stack([torch.randperm(length)[:count] for _ in range(4)])
    cache = HitCache(TieredStore(rows, tier="host"), count)
    asked = 0
    for _ in range(steps):
        indices = chosen.sort(-1).values.unsqueeze(0)
        assert torch.equal(cache.fetch(indices), indexed(rows, indices))
        asked += indices.numel() * 16 * 4
        for h in range(4):
            kept = chosen[h, torch.randperm(count)[: int(0.6 * count)]]
            others = torch.randperm(length)
            others = others[~torch.isin(others, chosen[h])][: count - kept.numel()]
            chosen[h] = torch.cat([kept, others])
    assert cache.bytes_moved <= 0.42 * asked


class Watch(TorchDispatchMode):
    """Counts torch's operations and the elements of the largest tensor that one gave."""

    def __init__(self):
        super().__init__()
        self.calls = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("call", ["fetch", "prefetch"])
def test_matching_takes_a_fixed_number_of_operations_on_tensors_of_order_k(ordered, call):
    counts = set()
    for k in (32, 2048):
        rows = torch.zeros(2, 2, 4 * k, 2)
        cache = HitCache(TieredStore(rows, tier="host"), k)
        ids = torch.stack([torch.randperm(4 * k)[: 2 * k] for _ in range(4)]).view(2, 2, 2 * k)
        first, second = ids[..., :k].clone(), ids[..., k // 2 : k // 2 + k].clone()
        if ordered:
            first, second = first.sort(-1).values, second.sort(-1).values
        getattr(cache, call)(first)
        with Watch() as watch:
            getattr(cache, call)(second)
        assert watch.largest <= rows.numel()  # the store's own rows, viewed
        assert watch.largest <= 2 * 2 * k * 8
        counts.add(watch.calls)
    assert len(counts) == 1


def test_reset_starts_anew():
    cache = HitCache(TieredStore(torch.ones(1, 1, 4, 2)), 3)
    cache.fetch(torch.tensor([[[0, 1]]]))
    cache.prefetch(torch.tensor([[[2, 3]]]))
    cache.reset()
    assert (cache.hits, cache.misses, cache.prefetched, cache.bytes_moved) == (0, 0, 0, 0)
    assert cache.nbytes == 0
    cache.fetch(torch.tensor([[[2, 3]]]))
    assert (cache.hits, cache.misses) == (0, 2)


@given(traces(), st.data())
def test_a_cache_that_resumes_counts_on(trace, data):
    rows, selections = trace
    store, cut = TieredStore(rows), data.draw(st.integers(0, len(selections)))
    first, second, later = HitCache(store, 8), HitCache(store, 8), HitCache(store, 8)
    for indices in selections[:cut]:
        first.fetch(indices)
    second.resume(first.counts)
    assert second.counts == first.counts
    for indices in selections[cut:]:
        second.fetch(indices)
        later.fetch(indices)
    for name in ("hits", "misses", "prefetched", "bytes_moved"):
        assert getattr(second, name) == getattr(first, name) + getattr(later, name)


def test_counts_of_something_else_are_refused():
    cache = HitCache(TieredStore(torch.ones(1, 1, 4, 2)), 3)
    with pytest.raises(ValueError, match=r"counts holds \['hits'\], wanted \['misses', 'pref"):
        cache.resume({"hits": 3})
    assert cache.hits == 0


def test_rows_come_from_memory_of_the_cache_and_only_misses_from_the_store(monkeypatch):
    from kv_offload._buffer import Buffer

    moved = []
    take = Buffer.take

    def watched(self, flat, out=None):
        moved.append(flat.numel())
        return take(self, flat, out)

    monkeypatch.setattr(Buffer, "take", watched)
    cache = HitCache(TieredStore(torch.arange(8.0).view(1, 1, 8, 1), tier="host"), 4)
    cache.fetch(torch.tensor([[[0, 1, 2]]]))
    cache.fetch(torch.tensor([[[1, 2, 5, 6]]]))
    assert moved == [3, 2]


def test_closing_the_store_frees_the_resident_rows():
    store = TieredStore(torch.ones(1, 1, 4, 2))
    cache = HitCache(store, 3)
    cache.fetch(torch.tensor([[[0, 1]]]))
    store.close()
    assert cache.nbytes == 0
    assert cache.misses == 2 and cache.bytes_moved == 16
    with pytest.raises(StoreClosedError):
        cache.fetch(torch.tensor([[[0, 1]]]))
