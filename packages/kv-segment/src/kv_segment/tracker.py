"""Sentence boundaries while tokens arrive."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_segment import _check
from kv_segment.split import mark_starts


class SentenceTracker:
    """`by_punctuation` over a stream: however it is cut, the starts are those of the whole.

    A sentence starts with the first token, and with each token that is no delimiter and follows
    one. A delimiter therefore never closes its sentence by itself: the next token decides.

    Args:
        table: bool[V], from `delimiter_table`; shared, never written.

    Attributes:
        start: position of the first token of the sentence that is being written.
        length: number of tokens fed so far; the sentence being written has `length - start`.
    """

    __slots__ = ("_after_delimiter", "_table", "length", "start")

    def __init__(self, table: ArrayLike) -> None:
        self._table = _check.delimiter_mask("table", table)
        self._after_delimiter = False
        self.start = 0
        self.length = 0

    def feed(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Take the next tokens; return the positions, in the whole stream, that start a sentence.

        The pieces' results joined, and `length` after them, are the offsets of the whole stream.

        Args:
            ids: int[N], N >= 0.

        Raises:
            TypeError: `ids` does not hold integers.
            ValueError: wrong shape, or an id outside the table. The state is then as before.
        """
        tokens = _check.integers("ids", ids)
        if len(tokens) == 0:
            return np.empty(0, dtype=np.int64)
        marks, after = mark_starts(tokens, self._table, alone=False, before=self._after_delimiter)
        if self.length == 0:
            marks[0] = True
        starts = np.flatnonzero(marks).astype(np.int64, copy=False)
        starts += self.length
        self._after_delimiter = after
        self.length += len(tokens)
        if len(starts):
            self.start = int(starts[-1])
        return starts

    def copy(self) -> SentenceTracker:
        """An independent tracker in the same state, for instance for another beam."""
        other = SentenceTracker(self._table)
        other._after_delimiter = self._after_delimiter
        other.start, other.length = self.start, self.length
        return other

    __copy__ = copy

    def __repr__(self) -> str:
        return f"SentenceTracker(start={self.start}, length={self.length})"
