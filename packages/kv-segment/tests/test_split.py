from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kv_segment as ks
from kv_segment import offsets

VOCABULARY = 6
tables = st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY).map(np.array)
streams = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)
both = pytest.mark.parametrize("cut", [ks.by_delimiters, ks.by_punctuation])
Cut = Callable[..., np.ndarray]


def slow_delimiters(ids: list[int], table: np.ndarray) -> list[int]:
    segments: list[list[int]] = []
    for t, token in enumerate(ids):
        if table[token] or not segments or table[ids[t - 1]]:
            segments.append([])
        segments[-1].append(token)
    return [0, *np.cumsum([len(s) for s in segments], dtype=int).tolist()]


def slow_punctuation(ids: list[int], table: np.ndarray) -> list[int]:
    segments: list[list[int]] = []
    closed = True
    for token in ids:
        if not segments or (closed and not table[token]):
            segments.append([])
        segments[-1].append(token)
        closed = bool(table[token])
    return [0, *np.cumsum([len(s) for s in segments], dtype=int).tolist()]


@given(streams, tables)
def test_by_delimiters_equals_the_sequential_definition(ids: list[int], table: np.ndarray) -> None:
    assert ks.by_delimiters(ids, table).tolist() == slow_delimiters(ids, table)


@given(streams, tables)
def test_by_punctuation_equals_the_sequential_definition(ids: list[int], table: np.ndarray) -> None:
    assert ks.by_punctuation(ids, table).tolist() == slow_punctuation(ids, table)


@both
@given(ids=streams, table=tables)
def test_segments_cover_without_gap_or_overlap(cut: Cut, ids: list[int], table: np.ndarray) -> None:
    offsets = cut(ids, table)
    assert offsets.dtype == np.int64
    ks.check_offsets(offsets, len(ids))
    joined = [t for a, b in itertools.pairwise(offsets) for t in ids[a:b]]
    assert joined == ids


@given(streams, tables)
def test_a_delimiter_stands_alone(ids: list[int], table: np.ndarray) -> None:
    offsets = ks.by_delimiters(ids, table)
    for a, b in itertools.pairwise(offsets):
        assert b - a == 1 or not table[ids[a:b]].any()


@given(streams, tables)
def test_a_segment_ends_with_its_delimiters(ids: list[int], table: np.ndarray) -> None:
    offsets = ks.by_punctuation(ids, table)
    for a, b in itertools.pairwise(offsets):
        marks = table[ids[a:b]]
        assert marks.tolist() == sorted(marks.tolist())
        assert marks[-1] or b == len(ids)


@given(streams, tables)
def test_punctuation_boundaries_are_delimiter_boundaries(ids: list[int], table: np.ndarray) -> None:
    assert set(ks.by_punctuation(ids, table).tolist()) <= set(ks.by_delimiters(ids, table).tolist())


@both
@given(ids=streams, table=tables, block=st.integers(1, 7))
def test_the_block_size_does_not_show(
    cut: Cut, ids: list[int], table: np.ndarray, block: int
) -> None:
    expected = cut(ids, table).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offsets, "BLOCK", block)
        assert cut(ids, table).tolist() == expected


@both
@given(ids=streams, table=tables, dtype=st.sampled_from([np.int32, np.uint8, np.uint64, np.int16]))
def test_the_integer_type_does_not_show(
    cut: Cut, ids: list[int], table: np.ndarray, dtype: type
) -> None:
    assert cut(np.array(ids, dtype=dtype), table).tolist() == cut(ids, table).tolist()


@both
@given(ids=st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_no_delimiter_is_one_segment(cut: Cut, ids: list[int]) -> None:
    assert cut(ids, np.zeros(VOCABULARY, dtype=bool)).tolist() == [0, len(ids)]


@given(ids=st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_only_delimiters(ids: list[int]) -> None:
    table = np.ones(VOCABULARY, dtype=bool)
    assert ks.by_delimiters(ids, table).tolist() == list(range(len(ids) + 1))
    assert ks.by_punctuation(ids, table).tolist() == [0, len(ids)]


@both
def test_one_token_and_none(cut: Cut) -> None:
    table = np.array([False, True])
    assert cut([0], table).tolist() == [0, 1]
    assert cut([1], table).tolist() == [0, 1]
    assert cut([], table).tolist() == [0]
    assert cut(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)).tolist() == [0]


@both
@pytest.mark.parametrize(
    ("ids", "table", "error", "message"),
    [
        ([0, 2], [True, False], ValueError, r"ids must be in \[0, 2\).*got 2"),
        ([0, -1], [True, False], ValueError, r"ids must be in \[0, 2\).*got -1"),
        ([[0]], [True], ValueError, r"ids must have one dimension, got shape \(1, 1\)"),
        ([0.5], [True], TypeError, "ids must hold integers, got dtype float64"),
        ([0], [[True]], ValueError, r"table must have one dimension, got shape \(1, 1\)"),
        ([0], [1, 0], TypeError, "table must be a bool array, got dtype int64"),
    ],
)
def test_refuses(
    cut: Cut, ids: list[int], table: list[bool], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cut(ids, table)
