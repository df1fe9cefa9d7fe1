"""What is packed and unpacked is the same: numbers, bits, types, and what was one thing is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_integration.storable import Packer, Unpacker, storable
from kv_offload import HitCache, RecordStore, TieredStore

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool]


@storable
@dataclass(frozen=True)
class Box:
    inside: Any


@storable
class Pair(NamedTuple):
    left: Any
    right: Any


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = (torch.rand(shape) * 9).to(draw(st.sampled_from(DTYPES)))
    form = draw(st.sampled_from(["plain", "expanded", "transposed"]))
    if form == "expanded":
        return made[..., None].expand(*shape, draw(st.integers(0, 3)))
    return made.T if form == "transposed" and len(shape) == 2 else made


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
values = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
        | st.builds(Box, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


def again(value, known=()):
    packer = Packer(dict(known))
    node = packer.pack(value, "it")
    return Unpacker(dict(known), packer.tensors, CPU).unpack(node)


def same(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return one.contiguous().flatten().tolist() == other.contiguous().flatten().tolist()
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and same(list(one.values()), list(other.values()))
    return same(one.inside, other.inside) if isinstance(one, Box) else one == other


@given(values)
def test_it_comes_back(value):
    assert same(value, again(value))


@given(values)
def test_what_was_one_thing_is_one(value):
    box, tensor = Box(value), torch.ones(2)
    one, other, (left, right) = again([box, (box,), Pair(tensor, tensor)])
    assert one is other[0]
    assert left is right


@given(tensors())
def test_a_repeated_tensor_takes_the_bytes_of_one(tensor):
    packer = Packer({})
    packer.pack([tensor, tensor], "it")
    stored = sum(x.numel() * x.element_size() for x in packer.tensors.values())
    assert stored <= tensor.untyped_storage().nbytes()
    assert again(tensor).untyped_storage().nbytes() == stored


def test_what_the_reader_has_is_not_stored():
    held = Box(torch.ones(3))
    packer = Packer({"held": held})
    node = packer.pack([held, Box(held)], "it")
    assert not packer.tensors
    first, second = Unpacker({"held": held}, {}, CPU).unpack(node)
    assert first is held and second.inside is held


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_stores_come_back_on_their_tier(tier):
    store = TieredStore.ragged([torch.rand(2, 5, 3), torch.rand(2, 3, 3)], tier=tier)
    records = RecordStore(torch.arange(6), [2, 0, 4], tier=tier)
    none = RecordStore(torch.empty(0), [], tier=tier)
    hits, at = HitCache(store, 4), torch.tensor([[[0, 2], [1, 2]], [[0, -1], [1, 2]]])
    hits.fetch(at)
    cache, found, read, empty = again([hits, store, records, none])
    assert cache.store is found
    assert (cache.hits, cache.misses, cache.bytes_moved) == (0, 7, hits.bytes_moved)
    assert found.tier == read.tier == empty.tier == tier
    assert torch.equal(found.lengths, store.lengths)
    assert torch.equal(cache.fetch(at), hits.fetch(at))
    assert same(read.read([0, 1, 2]), records.read([0, 1, 2]))
    assert (len(empty), empty.dtype) == (0, torch.float32)


def test_arrays_are_the_readers_own():
    array = np.arange(3)
    made = again(array)
    made[0] = 7
    assert made.tolist() == [7, 1, 2] and array[0] == 0


@pytest.mark.parametrize("value", [object(), {1}, range(3), [Box(object())]])
def test_what_nobody_said_how_to_store_is_refused(value):
    with pytest.raises(ValueError, match=r"^it\S* is a \w+, which cannot be saved"):
        Packer({}).pack(value, "it")
