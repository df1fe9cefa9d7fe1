"""Offsets, the form in which every segmentation is passed on.

`offsets: int64[S + 1]` with `offsets[0] == 0`, `offsets[-1] == T`, strictly increasing:
segment k holds the tokens `offsets[k] .. offsets[k + 1] - 1`. No token at all is `[0]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_segment import _check

BLOCK = 16384  # tokens that are looked at together: their temporaries stay in the cache


def check_offsets(offsets: ArrayLike, n: int) -> NDArray[np.int64]:
    """`offsets[0] == 0 < offsets[1] < ... < offsets[S] == n`, or an error that says what is wrong.

    Args:
        offsets: int[S + 1], anything numpy can read.
        n: number of tokens the segments must cover.

    Returns:
        The offsets as int64[S + 1]; the same array when it already is one.

    Raises:
        TypeError: `offsets` does not hold integers, or `n` is no int.
        ValueError: `n < 0`, wrong shape, wrong first or last entry, not strictly increasing.
    """
    n = _check.integer("n", n, least=0)
    array = _check.integers("offsets", offsets)
    if array.size == 0:
        raise ValueError("offsets must hold at least the entry 0, got an empty array")
    if array[0] != 0:
        raise ValueError(f"offsets must start at 0, got offsets[0] = {array[0]}")
    if array[-1] != n:
        raise ValueError(f"offsets must end at n = {n}, got offsets[-1] = {array[-1]}")
    falls = np.flatnonzero(array[1:] <= array[:-1])
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            "offsets must be strictly increasing, got "
            f"offsets[{i}] = {array[i]} and offsets[{i + 1}] = {array[i + 1]}"
        )
    return array.astype(np.int64, copy=False)


def segment_ids(offsets: ArrayLike) -> NDArray[np.int64]:
    """`segment_ids[t] = k` where `offsets[k] <= t < offsets[k + 1]`: int64[T].

    Raises as `check_offsets` does, with `n = offsets[-1]`.
    """
    array = _check.integers("offsets", offsets)
    array = check_offsets(array, int(array[-1]) if array.size and array[-1] > 0 else 0)
    ids = np.zeros(int(array[-1]), dtype=np.int64)
    ids[array[1:-1]] = 1
    return np.cumsum(ids, out=ids)


def fixed(n: int, size: int) -> NDArray[np.int64]:
    """`offsets = [0, size, 2 size, ..., n]`: segments of `size` tokens, the last one shorter.

    Args:
        n: number of tokens, `n >= 0`.
        size: tokens per segment, `size >= 1`.

    Raises:
        TypeError: `n` or `size` is no int.
        ValueError: `n < 0` or `size < 1`.
    """
    n = _check.integer("n", n, least=0)
    size = _check.integer("size", size, least=1)
    size = min(size, max(n, 1))
    offsets = np.arange(0, n + size, size, dtype=np.int64)
    offsets[-1] = n
    return offsets


def from_starts(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Offsets of the segments whose first tokens are True; the first of all must be."""
    offsets = np.empty(int(np.count_nonzero(starts)) + 1, dtype=np.int64)
    offsets[-1] = len(starts)
    filled = 0
    for i in range(0, len(starts), BLOCK):
        found = np.flatnonzero(starts[i : i + BLOCK])
        np.add(found, i, out=offsets[filled : filled + len(found)])
        filled += len(found)
    return offsets
