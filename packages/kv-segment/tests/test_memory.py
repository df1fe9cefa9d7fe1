from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

import kv_segment as ks

TOKENS = 1_000_000
Arrays = tuple[np.ndarray, ...]


def temporary_bytes(call: Callable[[], Arrays]) -> int:
    """Most bytes held at once beyond input and output."""
    tracemalloc.start()
    try:
        results = call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak - sum(result.nbytes for result in results)


def test_what_is_held_is_measured() -> None:
    assert temporary_bytes(lambda: (np.arange(TOKENS) % 7 == 0,)) >= 8 * TOKENS


@pytest.mark.parametrize("cut", [ks.by_delimiters, ks.by_punctuation])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_tables(cut: Callable[..., np.ndarray], share: float, dtype: type) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, TOKENS).astype(dtype)
    table = rng.random(1000) < share
    assert temporary_bytes(lambda: (cut(ids, table),)) <= 2 * TOKENS


@pytest.mark.parametrize("size", [1, 16, TOKENS])
def test_fixed(size: int) -> None:
    assert temporary_bytes(lambda: (ks.fixed(TOKENS, size),)) <= 2 * TOKENS


@pytest.mark.parametrize("alpha", [-3.0, 0.0, 1.0])
@pytest.mark.parametrize("shortest", [1, 16])
def test_surprisal(alpha: float, shortest: int) -> None:
    h = np.random.default_rng(0).exponential(2.0, TOKENS).astype(np.float32)
    assert temporary_bytes(lambda: ks.by_surprisal(h, alpha, shortest)) <= 2 * TOKENS


@pytest.mark.parametrize("size", [1, 16])
def test_segment_ids(size: int) -> None:
    offsets = ks.fixed(TOKENS, size)
    assert temporary_bytes(lambda: (ks.segment_ids(offsets),)) <= 2 * TOKENS
