"""A store of records is the list of them, whatever the tier."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import same_bits, tiers

from kv_offload import RecordStore, StoreClosedError

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])


@st.composite
def record_lists(draw):
    dtype, sizes = draw(dtypes), draw(st.lists(st.integers(0, 9), max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (100 * torch.rand(sum(sizes), generator=generator)).to(dtype), sizes


@given(record_lists(), tiers, st.data())
def test_a_record_comes_back_bit_for_bit(records, tier, data):
    numbers, sizes = records
    wanted = numbers.clone().split(sizes)
    ids = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=12)) if sizes else []
    with RecordStore(numbers, sizes, tier=tier) as store:
        numbers.zero_()  # the store has its own
        assert len(store) == len(sizes)
        for got, i in zip(store.read(ids), ids, strict=True):
            assert same_bits(got, wanted[i])
        starts = [0, *store.ends]
        for i, record in enumerate(wanted):
            assert same_bits(store.numbers[starts[i] : starts[i + 1]], record)
        assert starts[-1] == store.numbers.numel()


@given(record_lists(), tiers)
def test_bytes_are_those_of_the_numbers(records, tier):
    wanted = records[0].numel() * records[0].element_size()
    with RecordStore(*records, tier=tier) as store:
        assert (store.tier, store.dtype) == (tier, records[0].dtype)
        assert store.device == records[0].device
        assert store.nbytes == {name: wanted * (name == tier) for name in store.nbytes}


def test_a_closed_store_says_so_and_its_file_is_gone(tmp_path):
    store = RecordStore(torch.ones(3), [3], tier="disk", path=tmp_path / "records")
    assert list(tmp_path.iterdir())
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreClosedError):
        store.read([0])
    with pytest.raises(StoreClosedError):
        store.numbers  # noqa: B018


@pytest.mark.parametrize(
    ("numbers", "lengths", "error", "text"),
    [
        ([1.0], [1], TypeError, r"numbers is \[1.0\], wanted a tensor"),
        (torch.ones(1, 2), [2], ValueError, r"numbers has shape \(1, 2\), wanted \[N\]"),
        (torch.ones(3), [2], ValueError, "lengths sums to 2, wanted the 3 of numbers"),
        (torch.ones(3), [4, -1], ValueError, "lengths has -1, wanted at least 0"),
        (torch.ones(3), [3], ValueError, "tier"),
    ],
)
def test_what_is_no_list_of_records_is_refused(plain, numbers, lengths, error, text):
    tier = "cloud" if text == "tier" else "host"
    with pytest.raises(error, match=text):
        plain.RecordStore(numbers, lengths, tier=tier)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_an_id_out_of_range_is_refused(wrong):
    store = RecordStore(torch.ones(4), [3, 1])
    with pytest.raises(IndexError, match=f"record {wrong}, wanted 0 to 1"):
        store.read([0, wrong])
