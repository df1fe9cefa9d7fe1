"""A store of batch rows of unequal length is each row's own store, without padding."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import (
    batch_orders,
    devices,
    indexed,
    ragged_indices,
    ragged_rows,
    random_rows,
    same_bits,
    seeds,
    tiers,
)

from kv_offload import HitCache, TieredStore


def holds(store, rows) -> bool:
    """Whether a store holds just these rows, by its public figures and gather."""
    longest = max(row.shape[1] for row in rows)
    if store.lengths.tolist() != [row.shape[1] for row in rows] or store.shape[2] != longest:
        return False
    every = torch.arange(longest).expand(len(rows), rows[0].shape[0], longest)
    every = torch.where(every < store.lengths.view(-1, 1, 1), every, -1)
    return same_bits(store.gather(every), indexed(rows, every))


def joined(rows, more, counts):
    return [torch.cat([row, new[:, :n]], 1) for row, new, n in zip(rows, more, counts, strict=True)]


@given(ragged_rows(), tiers, devices, st.data())
def test_gather_equals_indexing_each_row(rows, tier, device, data):
    with TieredStore.ragged(rows, tier=tier, device=device) as store:
        indices = data.draw(ragged_indices(rows))
        assert same_bits(store.gather(indices), indexed(rows, indices))
        start = random_rows((*indices.shape, rows[0].shape[2]), rows[0].dtype, 1)
        found = store.gather_async(indices, out=start.to(device)).wait()
        assert same_bits(found, indexed(rows, indices, start=start))
        if tier == "device":  # as on CUDA
            masked = store._buffer._gather_masked(indices, start.to(device))
            assert same_bits(masked, indexed(rows, indices, start=start))


@given(ragged_rows(), tiers)
def test_bytes_are_those_of_the_real_rows(rows, tier):
    wanted = sum(row.numel() * row.element_size() for row in rows)
    with TieredStore.ragged(rows, tier=tier) as store:
        assert store.nbytes == {name: wanted * (name == tier) for name in store.nbytes}
        assert store._buffer.rows.untyped_storage().nbytes() == wanted


@given(ragged_rows(), tiers, seeds, st.data())
def test_rows_appended_raggedly_are_the_whole(rows, tier, seed, data):
    with TieredStore.ragged(rows, tier=tier) as store:
        for step in range(data.draw(st.integers(0, 4))):
            n = data.draw(st.integers(0, 5))
            shape = (len(rows), rows[0].shape[0], n, rows[0].shape[2])
            more = random_rows(shape, rows[0].dtype, seed + step)
            counts = data.draw(st.lists(st.integers(0, n), min_size=len(rows), max_size=len(rows)))
            if data.draw(st.booleans()):
                store.append(more, lengths=torch.tensor(counts))
            else:
                counts = [n] * len(rows)
                store.append(more)
            rows = joined(rows, more, counts)
            assert holds(store, rows)


@given(ragged_rows(), tiers, st.data())
def test_truncate_cuts_each_row_at_its_own_length(rows, tier, data):
    with TieredStore.ragged(rows, tier=tier) as store:
        kept = [data.draw(st.integers(0, row.shape[1])) for row in rows]
        store.truncate(torch.tensor(kept))
        rows = [row[:, :n] for row, n in zip(rows, kept, strict=True)]
        assert holds(store, rows)
        n = data.draw(st.integers(0, max(kept)))
        store.truncate(n)
        rows = [row[:, :n] for row in rows]
        assert holds(store, rows)
        more = random_rows((len(rows), rows[0].shape[0], 2, rows[0].shape[2]), rows[0].dtype, 3)
        store.append(more)
        assert holds(store, joined(rows, more, [2] * len(rows)))


@given(ragged_rows(), st.lists(tiers, max_size=3), st.data())
def test_rows_keep_their_lengths_through_tiers_and_orders(rows, route, data):
    with TieredStore.ragged(rows) as store:
        for tier in route:
            store.to_tier(tier)
            order = data.draw(batch_orders(len(rows), st.integers(1, 4)))
            store.select_rows(order)
            rows = [rows[b] for b in order.tolist()]
            assert store.tier == tier and holds(store, rows)


@given(ragged_rows(), tiers, st.data())
def test_a_hit_cache_over_ragged_rows_is_right_and_counts_right(rows, tier, data):
    width_bytes = rows[0].shape[2] * rows[0].element_size()
    resident = [[set() for _ in row] for row in rows]
    requested = misses = 0
    with TieredStore.ragged(rows, tier=tier) as store:
        cache = HitCache(store, 8)
        for _ in range(data.draw(st.integers(1, 5))):
            indices = data.draw(ragged_indices(rows))
            assert same_bits(cache.fetch(indices), indexed(rows, indices))
            for b, heads in enumerate(indices.tolist()):
                for h, ids in enumerate(heads):
                    asked = [index for index in ids if index >= 0]
                    requested += len(asked)
                    misses += sum(index not in resident[b][h] for index in asked)
                    resident[b][h] = set(asked)
            assert (cache.misses, cache.hits + cache.misses) == (misses, requested)
            assert cache.bytes_moved == misses * width_bytes


@given(ragged_rows(), st.data(), seeds)
def test_a_hit_cache_forgets_what_each_row_dropped(rows, data, seed):
    store = TieredStore.ragged(rows)
    cache = HitCache(store, 8)
    indices = data.draw(ragged_indices(rows))
    cache.fetch(indices)
    kept = [data.draw(st.integers(0, row.shape[1])) for row in rows]
    store.truncate(torch.tensor(kept))
    shape = (len(rows), rows[0].shape[0], 9, rows[0].shape[2])
    more = random_rows(shape, rows[0].dtype, seed)
    store.append(more)
    cut = [row[:, :n] for row, n in zip(rows, kept, strict=True)]
    misses = cache.misses
    assert same_bits(cache.fetch(indices), indexed(joined(cut, more, [9] * len(rows)), indices))
    gone = indices >= torch.tensor(kept).view(-1, 1, 1)
    assert cache.misses == misses + int(gone.sum())


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 80))
def test_appending_one_by_one_moves_to_new_storage_log_n_times(lengths, steps):
    rows = [torch.zeros(2, length, 4) for length in lengths]
    with TieredStore.ragged(rows, tier="host") as store:
        sizes = [store.nbytes["host"]]
        for _ in range(steps):
            store.append(torch.ones(len(rows), 2, 1, 4))
            sizes.append(store.nbytes["host"])
        held = int(store.lengths.sum()) * 2 * 4 * 4
    assert len(set(sizes)) <= 4 + math.log2(sum(lengths) + len(rows) * steps)
    assert sizes[-1] <= 2 * held


def test_heads_of_unequal_length_are_batch_rows_of_one_head():
    lengths = [[3, 0, 5], [1, 4, 2]]
    heads = [torch.randn(1, n, 4) for row in lengths for n in row]
    indices = torch.tensor([[[2, -1], [-1, -1], [4, 0]], [[0, -1], [3, 1], [1, 0]]])
    with TieredStore.ragged(heads, tier="host") as store:
        rows = store.gather(indices.view(6, 1, 2)).view(2, 3, 2, 4)
        assert store.nbytes["host"] == 15 * 4 * 4
    assert torch.equal(rows[0, 2], heads[2][0, [4, 0]])
    assert torch.equal(rows[1, 1], heads[4][0, [3, 1]])
    assert (rows[0, 1] == 0).all()


def test_the_scratch_file_of_a_ragged_store_comes_and_goes(tmp_path):
    rows = [torch.ones(2, 3, 4), torch.ones(2, 0, 4)]
    with TieredStore.ragged(rows, tier="disk", path=tmp_path / "rows") as store:
        store.append(torch.ones(2, 2, 1, 4))
        assert os.listdir(tmp_path) == ["rows"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "rows", "text"),
    [
        (TypeError, 3, "rows is 3, wanted a sequence of tensors"),
        (ValueError, [], "rows is empty, wanted a tensor for each batch row"),
        (TypeError, [3], r"rows\[0\] is 3, wanted a tensor"),
        (ValueError, [torch.ones(1, 1, 1, 1)], r"rows\[0\] has shape \(1, 1, 1, 1\), wanted \[H"),
        (
            TypeError,
            [torch.ones(1, 2, 3), torch.ones(1, 2, 3).half()],
            r"rows\[1\] has dtype torch.float16, wanted torch.float32 as rows\[0\]",
        ),
        (
            ValueError,
            [torch.ones(1, 2, 3), torch.ones(2, 2, 3)],
            r"rows\[1\] has shape \(2, 2, 3\), wanted \(1, N_b, 3\) as rows\[0\]",
        ),
    ],
)
def test_rows_that_do_not_go_together_are_refused(plain, kind, rows, text):
    with pytest.raises(kind, match=text):
        plain.TieredStore.ragged(rows)


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        (
            lambda store: store.gather(torch.tensor([[[0]], [[2]]])),
            ValueError,
            "indices holds 2, wanted -1 .skip. or a row below 2, the number of rows held in batch "
            "row 1",
        ),
        (
            lambda store: store.append(torch.ones(2, 1, 1, 4), lengths=torch.tensor([0, 2])),
            ValueError,
            "lengths holds 2 for batch row 1, wanted 0 to 1",
        ),
        (
            lambda store: store.append(torch.ones(2, 1, 1, 4), lengths=[1, 1]),
            TypeError,
            r"lengths is \[1, 1\], wanted an int64 tensor",
        ),
        (
            lambda store: store.truncate(torch.tensor([4, 0])),
            ValueError,
            "n holds 4 for batch row 0, wanted 0 to 3",
        ),
        (
            lambda store: store.truncate(torch.tensor([1])),
            ValueError,
            r"n has shape \(1,\), wanted \(2,\)",
        ),
        (lambda store: store.truncate(4), ValueError, "n is 4, wanted 0 to 3, the rows held"),
    ],
)
def test_wrong_input_is_refused_and_changes_nothing(plain, use, kind, text):
    rows = [torch.randn(1, 3, 4), torch.randn(1, 2, 4)]
    store = plain.TieredStore.ragged(rows, tier="host")
    cache = plain.HitCache(store, 4)
    with pytest.raises(kind, match=text):
        use(store)
    with pytest.raises(ValueError, match=r"indices holds 2.* in batch row 1"):
        cache.fetch(torch.tensor([[[0]], [[2]]]))
    assert holds(store, rows)
