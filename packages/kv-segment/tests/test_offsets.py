from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kv_segment as ks

lengths = st.lists(st.integers(1, 9), max_size=12)


@given(n=st.integers(0, 500), size=st.integers(1, 60))
def test_fixed_covers_with_full_segments_and_one_rest(n: int, size: int) -> None:
    got = ks.fixed(n, size)
    expected = [t for t in range(n) if t % size == 0] + [n]
    assert got.tolist() == expected
    assert got.dtype == np.int64


@given(lengths)
def test_segment_ids_name_the_segment_that_holds_the_token(sizes: list[int]) -> None:
    offsets = np.cumsum([0, *sizes])
    expected = [k for k, size in enumerate(sizes) for _ in range(size)]
    got = ks.segment_ids(offsets)
    assert got.tolist() == expected
    assert got.dtype == np.int64


@given(lengths, st.sampled_from([np.int64, np.int32, np.uint16]))
def test_valid_offsets_come_back_as_int64(sizes: list[int], dtype: type) -> None:
    offsets = np.cumsum([0, *sizes]).astype(dtype)
    got = ks.check_offsets(offsets, sum(sizes))
    assert got.dtype == np.int64
    assert got.tolist() == offsets.tolist()


@given(lengths.filter(bool), st.data())
def test_any_entry_out_of_order_is_refused(sizes: list[int], data: st.DataObject) -> None:
    offsets = np.cumsum([0, *sizes])
    i = data.draw(st.integers(0, len(sizes)))
    low = offsets[i - 1] + 1 if i else 0
    high = offsets[i + 1] - 1 if i < len(sizes) else offsets[-1]
    wrong = data.draw(
        st.integers(-5, int(offsets[-1]) + 5).filter(
            lambda v: not low <= v <= high if 0 < i < len(sizes) else v != offsets[i]
        )
    )
    offsets[i] = wrong
    with pytest.raises(ValueError, match=r"offsets must .*got"):
        ks.check_offsets(offsets, sum(sizes))


@pytest.mark.parametrize(
    ("offsets", "n", "error", "message"),
    [
        ([], 0, ValueError, "at least the entry 0"),
        ([1, 4], 4, ValueError, r"start at 0, got offsets\[0\] = 1"),
        ([0, 3], 4, ValueError, r"end at n = 4, got offsets\[-1\] = 3"),
        ([0, 3, 3, 4], 4, ValueError, r"offsets\[1\] = 3 and offsets\[2\] = 3"),
        ([[0, 3]], 3, ValueError, r"one dimension, got shape \(1, 2\)"),
        ([0.0, 3.0], 3, TypeError, "integers, got dtype float64"),
        ([[0], [1, 2]], 3, ValueError, r"offsets must be an array, got \[\[0\], \[1, 2\]\]"),
        ([0, float("nan")], 3, TypeError, "integers, got dtype float64"),
        ([0], -1, ValueError, "n must be at least 0, got -1"),
        ([0, 1], True, TypeError, "n must be an int, got True"),
    ],
)
def test_check_offsets_says_what_is_wrong(
    offsets: list[int], n: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ks.check_offsets(offsets, n)


def test_unsigned_offsets_that_fall_are_refused() -> None:
    with pytest.raises(ValueError, match="strictly increasing"):
        ks.check_offsets(np.array([0, 4, 2, 5], dtype=np.uint64), 5)


def test_no_token_is_one_offset() -> None:
    assert ks.fixed(0, 3).tolist() == [0]
    assert ks.check_offsets([0], 0).tolist() == [0]
    assert ks.segment_ids([0]).tolist() == []


def test_a_size_beyond_every_integer_is_one_segment() -> None:
    assert ks.fixed(5, 2**80).tolist() == [0, 5]
    assert ks.fixed(0, 2**80).tolist() == [0]


@pytest.mark.parametrize(
    ("n", "size", "message"),
    [(-1, 2, "n must be at least 0, got -1"), (3, 0, "size must be at least 1, got 0")],
)
def test_fixed_refuses(n: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ks.fixed(n, size)


def test_segment_ids_refuses_what_check_offsets_refuses() -> None:
    with pytest.raises(ValueError, match=r"start at 0, got offsets\[0\] = 2"):
        ks.segment_ids([2, 3])
    with pytest.raises(ValueError, match="at least the entry 0"):
        ks.segment_ids([])
