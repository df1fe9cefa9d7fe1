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
    dtype, sizes = draw(dtypes), draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return [(100 * torch.rand(n, generator=generator)).to(dtype) for n in sizes]


@given(record_lists(), tiers, st.data())
def test_a_record_comes_back_bit_for_bit(records, tier, data):
    ids = data.draw(st.lists(st.integers(0, len(records) - 1), max_size=12))
    wanted = [record.clone() for record in records]
    with RecordStore(records, tier=tier) as store:
        for record in records:
            record.zero_()  # the store has its own
        assert len(store) == len(records)
        for got, i in zip(store.read(ids), ids, strict=True):
            assert same_bits(got, wanted[i])


@given(record_lists(), tiers)
def test_bytes_are_those_of_the_numbers(records, tier):
    wanted = sum(record.numel() * record.element_size() for record in records)
    with RecordStore(records, tier=tier) as store:
        assert (store.tier, store.dtype) == (tier, records[0].dtype)
        assert store.nbytes == {name: wanted * (name == tier) for name in store.nbytes}


def test_a_closed_store_says_so_and_its_file_is_gone(tmp_path):
    store = RecordStore([torch.ones(3)], tier="disk", path=tmp_path / "records")
    assert list(tmp_path.iterdir())
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreClosedError):
        store.read([0])


@pytest.mark.parametrize(
    ("records", "error", "text"),
    [
        ([], ValueError, "records is empty"),
        ([torch.ones(2), torch.ones(1, 2)], ValueError, r"records\[1\] has shape \(1, 2\)"),
        ([torch.ones(2), torch.ones(2).half()], TypeError, r"records\[1\] has dtype torch.float16"),
        ([torch.ones(2), [1.0]], TypeError, r"records\[1\] is \[1.0\], wanted a tensor"),
    ],
)
def test_what_is_no_list_of_records_is_refused(records, error, text):
    with pytest.raises(error, match=text):
        RecordStore(records)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_an_id_out_of_range_is_refused(wrong):
    store = RecordStore([torch.ones(3), torch.ones(1)])
    with pytest.raises(IndexError, match=f"record {wrong}, wanted 0 to 1"):
        store.read([0, wrong])
