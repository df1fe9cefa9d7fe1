"""Segments from token ids and a delimiter table: one look-up per token.

Both functions mark segment starts in one bool per token and then write the offsets, in blocks
that fit the cache: nothing else grows with the number of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_segment import _check, offsets


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
    starts, _ = mark_starts(tokens, _check.delimiter_mask("table", table), alone=alone)
    if len(starts):
        starts[0] = True
    return offsets.from_starts(starts)


def mark_starts(
    ids: NDArray[np.integer[Any]],
    table: NDArray[np.bool_],
    *,
    alone: bool,
    before: bool = False,
) -> tuple[NDArray[np.bool_], bool]:
    """Where segments start: bool[T], and whether the last token is a delimiter.

    `before` says whether the token before `ids` is one. The first start of a text is the
    caller's to set.
    """
    starts = np.empty(len(ids), dtype=np.bool_)
    for i in range(0, len(ids), offsets.BLOCK):
        block = ids[i : i + offsets.BLOCK]
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= len(table):
            raise ValueError(
                f"ids must be in [0, {len(table)}), the size of table, "
                f"got {low if low < 0 else high}"
            )
        marks = table[block]
        previous = np.empty_like(marks)
        previous[0] = before
        previous[1:] = marks[:-1]
        before = bool(marks[-1])
        # On bools, greater is "a and not b".
        compare = np.logical_or if alone else np.greater
        compare(previous, marks, out=starts[i : i + offsets.BLOCK])
    return starts, before
