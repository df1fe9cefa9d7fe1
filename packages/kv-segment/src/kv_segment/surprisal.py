"""Spans bounded by surprising tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kv_segment import _check


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
        TypeError: `h` does not hold real numbers, or `min_length` is no int.
        ValueError: `h` has not one dimension or holds NaN or infinity, `alpha` is not finite,
            or `min_length < 1`.

    Source: SeKV, section 3.1 (threshold), section 3.2 (L_min), Table 7 (alpha = 1).
    """
    values = np.asarray(h)
    if values.ndim != 1:
        raise ValueError(f"h must have one dimension, got shape {values.shape}")
    if values.dtype.kind not in "fiu":
        raise TypeError(f"h must hold real numbers, got dtype {values.dtype}")
    values = values.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise ValueError(f"h must be finite, got h[{wrong[0]}] = {values[wrong[0]]}")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be finite, got {alpha}")
    min_length = _check.integer("min_length", min_length, least=1)
    if len(values) == 0:
        return np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.bool_)

    # Measured from the smallest value, so that equal values stay exactly at the mean.
    values -= values.min()
    anchors = values > values.mean() + alpha * values.std()
    runs = _run_offsets(anchors)
    short = (np.diff(runs) < min_length) & ~anchors[runs[:-1]]
    anchors |= np.repeat(short, np.diff(runs))
    return _run_offsets(anchors), anchors


def _run_offsets(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Offsets of the runs of equal values."""
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    return np.concatenate(([0], changes, [len(mask)])).astype(np.int64, copy=False)
