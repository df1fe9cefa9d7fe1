"""Segments from token ids and a delimiter table: one look-up per token.

Both functions mark segment starts in one bool per token and then write the offsets, in blocks
that fit the cache: nothing else grows with the number of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_segment import _check

_BLOCK = 16384


def by_delimiters(ids: ArrayLike, table: ArrayLike) -> NDArray[np.int64]:
    """Start at t iff `table[ids[t]] or table[ids[t - 1]]`: delimiters alone, chunks between them.

    Args:
        ids: int[T], token ids.
        table: bool[V], from `delimiter_table`.

    Returns:
        int64[S + 1] offsets; `[0]` for no token.

    Raises:
        TypeError: `ids` does not hold integers or `table` no bools.
        ValueError: wrong shape, or an id outside `[0, V)`.

    Source: SemantiCache, section 2.2 and Eq. 1.
    """
    return _split(ids, table, alone=True)


def by_punctuation(ids: ArrayLike, table: ArrayLike) -> NDArray[np.int64]:
    r"""Start at t iff `table[ids[t - 1]] and not table[ids[t]]`: a segment ends with its delimiter.

    A run of delimiter tokens, such as `"."` then `"\n"`, belongs to the segment that it closes;
    a run that opens the text is a segment of its own.

    Arguments, result and errors are those of `by_delimiters`.

    Source: SentenceKV, section 4.1; SABlock, section III-A.
    """
    return _split(ids, table, alone=False)


def _split(ids: ArrayLike, table: ArrayLike, *, alone: bool) -> NDArray[np.int64]:
    tokens = _check.integers("ids", ids)
    marks = _check.delimiter_mask("table", table)
    starts = np.empty(len(tokens), dtype=np.bool_)
    before = False
    for i in range(0, len(tokens), _BLOCK):
        before = mark_starts(tokens[i : i + _BLOCK], marks, before, alone, starts[i : i + _BLOCK])
    if len(starts):
        starts[0] = True
    return _offsets(starts)


def mark_starts(
    ids: NDArray[np.integer[Any]],
    table: NDArray[np.bool_],
    before: bool,
    alone: bool,
    starts: NDArray[np.bool_],
) -> bool:
    """Fill `starts` for one block; `before` says whether the token before it is a delimiter.

    Returns whether the block's last token is a delimiter. The first start of a text is the
    caller's to set.
    """
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= len(table):
        raise ValueError(
            f"ids must be in [0, {len(table)}), the size of table, got {low if low < 0 else high}"
        )
    marks = table[ids]
    previous = np.empty_like(marks)
    previous[0] = before
    previous[1:] = marks[:-1]
    # On bools, greater is "a and not b".
    (np.logical_or if alone else np.greater)(previous, marks, out=starts)
    return bool(marks[-1])


def _offsets(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    count = int(np.count_nonzero(starts))
    offsets = np.empty(count + 1, dtype=np.int64)
    offsets[-1] = len(starts)
    filled = 0
    for i in range(0, len(starts), _BLOCK):
        found = np.flatnonzero(starts[i : i + _BLOCK])
        offsets[filled : filled + len(found)] = found + i
        filled += len(found)
    return offsets
