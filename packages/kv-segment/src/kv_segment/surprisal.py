"""Spans bounded by surprising tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_segment import _check, offsets


def by_surprisal(
    h: ArrayLike, alpha: float = 1.0, min_length: int = 16
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Anchors are `h > mean(h) + alpha * std(h)`; the tokens between two anchors are a span.

    Spans shorter than `min_length` are kept exactly as the anchors are, so they are marked as
    anchors too: each segment is either a run of anchors or one span of at least `min_length`
    tokens without any. With `min_length = 1` the mask is the threshold's alone.

    Args:
        h: float[T], surprisal of each token in nats (any unit or constant added gives the same).
            A first token that nothing predicts needs a finite value too, such as 0.
        alpha: threshold in standard deviations (population) above the mean.
        min_length: shortest span that is worth a summary, in tokens, at least 1.

    Returns:
        offsets: int64[S + 1]; `[0]` for no token.
        anchors: bool[T], the tokens to keep exactly.

    Raises:
        TypeError: `h` does not hold real numbers, `alpha` is none, or `min_length` is no int.
        ValueError: `h` has not one dimension or holds NaN or infinity, `alpha` is not finite,
            or `min_length < 1`.

    Beside the result it holds one byte per token.

    Source: SeKV, section 3.1 (threshold), section 3.2 (L_min), Table 7 (alpha = 1).
    """
    values = _check.as_array("h", h)
    if values.ndim != 1:
        raise ValueError(f"h must have one dimension, got shape {values.shape}")
    if values.dtype.kind not in "fiu":
        raise TypeError(f"h must hold real numbers, got dtype {values.dtype}")
    alpha = _check.number("alpha", alpha)
    min_length = _check.integer("min_length", min_length, least=1)
    for i, part in _blocks(values):
        wrong = np.flatnonzero(~np.isfinite(part))
        if wrong.size:
            raise ValueError(f"h must be finite, got h[{i + wrong[0]}] = {part[wrong[0]]}")

    anchors = _above(values, alpha)
    _fill_short_gaps(anchors, min_length)
    starts = np.empty(len(anchors), dtype=np.bool_)
    starts[:1] = True
    np.not_equal(anchors[1:], anchors[:-1], out=starts[1:])
    return offsets.from_starts(starts), anchors


def _blocks(values: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Position and float64 values of each block."""
    for i in range(0, len(values), offsets.BLOCK):
        yield i, values[i : i + offsets.BLOCK].astype(np.float64)


def _above(values: NDArray[Any], alpha: float) -> NDArray[np.bool_]:
    """values > mean + alpha * std, in three passes of one block at a time."""
    above = np.empty(len(values), dtype=np.bool_)
    if len(values) == 0:
        return above
    # Measured from the smallest value, so that equal values stay exactly at the mean.
    low = np.float64(values.min())
    mean = sum(float((part - low).sum()) for _, part in _blocks(values)) / len(values)
    squares = sum(float(np.square(part - low - mean).sum()) for _, part in _blocks(values))
    threshold = mean + alpha * math.sqrt(squares / len(values))
    for i, part in _blocks(values):
        np.greater(part - low, threshold, out=above[i : i + offsets.BLOCK])
    return above


def _fill_short_gaps(mask: NDArray[np.bool_], shortest: int) -> None:
    """Set, in place, each run of False of fewer than `shortest` tokens to True."""
    last = -1  # position of the last True so far
    for i in range(0, len(mask), offsets.BLOCK):
        block = mask[i : i + offsets.BLOCK]
        found = np.flatnonzero(block)
        if found.size == 0:
            continue
        if i + found[0] - last <= shortest:  # a gap that may have begun blocks ago
            mask[last + 1 : i + found[0]] = True
        short = np.diff(found) <= shortest
        last = i + int(found[-1])
        # +1 where a short gap's run begins, -1 where it ends: the sum is 1 inside.
        edges = np.zeros(len(block), dtype=np.int8)
        edges[found[:-1][short]] += 1
        edges[found[1:][short]] -= 1
        block |= np.cumsum(edges, dtype=np.int8, out=edges).view(np.bool_)
    if len(mask) - last <= shortest:
        mask[last + 1 :] = True
