from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kv_segment as ks

VOCABULARY = 5
tables = st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY).map(np.array)
pieces = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=7), max_size=12)


@given(pieces, tables)
def test_any_split_of_the_stream_gives_the_batch_offsets(
    parts: list[list[int]], table: np.ndarray
) -> None:
    tracker = ks.SentenceTracker(table)
    starts = [s for part in parts for s in tracker.feed(part).tolist()]
    whole = [token for part in parts for token in part]
    assert [*starts, tracker.length] == ks.by_punctuation(whole, table).tolist()


@given(pieces, tables)
def test_start_is_that_of_the_sentence_being_written(
    parts: list[list[int]], table: np.ndarray
) -> None:
    tracker = ks.SentenceTracker(table)
    seen: list[int] = []
    for part in parts:
        found = tracker.feed(part)
        assert found.dtype == np.int64
        assert all(len(seen) <= s < len(seen) + len(part) for s in found)
        seen += part
        assert tracker.length == len(seen)
        expected = 0
        for t in range(1, len(seen)):
            if table[seen[t - 1]] and not table[seen[t]]:
                expected = t
        assert tracker.start == expected


@given(pieces, pieces, pieces, tables)
def test_a_copy_goes_its_own_way(
    first: list[list[int]], one: list[list[int]], other: list[list[int]], table: np.ndarray
) -> None:
    def feed(tracker: ks.SentenceTracker, parts: list[list[int]]) -> list[int]:
        return [s for part in parts for s in tracker.feed(part).tolist()]

    tracker = ks.SentenceTracker(table)
    feed(tracker, first)
    twins = [tracker.copy(), copy.copy(tracker), copy.deepcopy(tracker)]
    feed(tracker, one)
    fresh = ks.SentenceTracker(table)
    feed(fresh, first)
    expected = feed(fresh, other)
    for twin in twins:
        assert feed(twin, other) == expected
        assert (twin.start, twin.length) == (fresh.start, fresh.length)


def test_no_delimiter_only_delimiters_one_token_and_none() -> None:
    for table, ids, expected in [
        ([False, True], [0, 0, 0], [0]),
        ([False, True], [1, 1, 1], [0]),
        ([False, True], [1], [0]),
        ([False, True], [], []),
    ]:
        tracker = ks.SentenceTracker(table)
        assert [s for token in ids for s in tracker.feed([token])] == expected
        assert (tracker.feed([]).tolist(), tracker.start) == ([], 0)
        assert tracker.length == len(ids)


def test_a_refused_piece_leaves_the_state() -> None:
    tracker = ks.SentenceTracker(np.array([False, True]))
    tracker.feed([0, 1])
    with pytest.raises(ValueError, match=r"ids must be in \[0, 2\).*got 7"):
        tracker.feed([0, 7])
    with pytest.raises(TypeError, match="ids must hold integers, got dtype float64"):
        tracker.feed([0.5])
    assert repr(tracker) == "SentenceTracker(start=0, length=2)"
    assert tracker.feed([0]).tolist() == [2]


def test_refuses_a_table_of_numbers() -> None:
    with pytest.raises(TypeError, match="table must be a bool array, got dtype int64"):
        ks.SentenceTracker([0, 1])
