"""Clustering and adaptive blocks as the papers write them, for one row: what is held against.

`cluster` and `blocks` go token by token, through rows of torch or of numpy, with norms computed
once; `cluster_by_pairs` takes each cosine from its two keys in float64, as a test would;
`cluster_by_seed` and `blocks_by_segment` are the same algorithms with numpy operations for all
tokens of a chunk, the usual way to write them fast. None of them uses kv-policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]


def cluster(keys: Tensor | Floats, offsets: Ints, theta: float) -> Ints:
    """SemantiCache, Algorithm 1: keys [H, T, D] -> the seed of each token's cluster [H, T]."""
    seeds = np.full(keys.shape[:2], -1, dtype=np.int64)
    lengths = (keys * keys).sum(-1) ** 0.5
    for own, rows, norms in zip(seeds, keys, lengths, strict=True):

        def cosine(s: int, t: int, rows: Any = rows, norms: Any = norms) -> Any:
            return rows[s] @ rows[t] / (norms[s] * norms[t])

        _absorb(own, offsets, theta, cosine)
    return seeds


def cluster_by_pairs(keys: Floats, offsets: Ints, theta: float) -> Ints:
    """`cluster` with every cosine taken from its two keys, norms and all, in float64."""
    seeds = np.full(keys.shape[:2], -1, dtype=np.int64)
    for own, rows in zip(seeds, keys.astype(np.float64), strict=True):

        def cosine(s: int, t: int, rows: Floats = rows) -> float:
            one, other = rows[s], rows[t]
            return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))

        _absorb(own, offsets, theta, cosine)
    return seeds


def _absorb(own: Ints, offsets: Ints, theta: float, cosine: Callable[[int, int], Any]) -> None:
    """Fills the seeds of one head, token by token; -1 is a free token."""
    for start, end in itertools.pairwise(offsets.tolist()):
        for seed in range(start, end):
            if own[seed] >= 0:
                continue
            own[seed] = seed
            for token in range(seed + 1, end):
                if own[token] < 0 and cosine(seed, token) > theta:
                    own[token] = seed


def cluster_by_seed(keys: Floats, offsets: Ints, theta: float) -> Ints:
    """`cluster` with one product of a seed and all tokens after it."""
    seeds = np.full(keys.shape[:2], -1, dtype=np.int64)
    units = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    for rows, own in zip(units, seeds, strict=True):
        for start, end in itertools.pairwise(offsets.tolist()):
            chunk, label = rows[start:end], own[start:end]
            for seed in range(end - start):
                if label[seed] >= 0:
                    continue
                label[seed] = start + seed
                later = label[seed + 1 :]
                similar = chunk[seed + 1 :] @ chunk[seed] > theta
                later[similar & (later < 0)] = start + seed
    return seeds


def blocks(
    scores: Tensor | Floats, offsets: Ints, budget: int, *, max_block: int, delta: float
) -> list[list[int]]:
    """SABlock, Algorithm 2: float64 scores [H, T] -> positions kept in each head, ascending."""
    kept: list[list[int]] = []
    for row in scores:
        top = np.argsort(-np.asarray(row), kind="stable")[:budget]
        segments = np.searchsorted(offsets, top, side="right") - 1
        quotas = np.bincount(segments, minlength=len(offsets) - 1).tolist()
        own: list[int] = []
        for (start, end), quota in zip(itertools.pairwise(offsets.tolist()), quotas, strict=True):
            own += _segment(row, start, end, quota, max_block, delta)
        kept.append(sorted(own))
    return kept


def _segment(
    row: Tensor | Floats, start: int, end: int, quota: int, max_block: int, delta: float
) -> list[int]:
    """What one segment keeps: the longest blocks that hold delta of the best tokens' score."""

    def ranked(tokens: range) -> list[int]:
        return sorted(tokens, key=lambda t: (-row[t], t))

    best = sum(row[t] for t in ranked(range(start, end))[:quota])
    for size in range(min(max_block, quota), 0, -1):
        parts = [range(at, min(at + size, end)) for at in range(start, end, size)]
        means = [np.float32(float(sum(row[t] for t in part)) / len(part)) for part in parts]
        kept: list[int] = []
        for k in sorted(range(len(parts)), key=lambda k: (-means[k], k)):
            room = quota - len(kept)
            if room == 0:
                break
            kept += ranked(parts[k])[:room]
        if sum(row[t] for t in kept) >= delta * best:
            return kept
    return []


def blocks_by_segment(
    scores: Floats, offsets: Ints, budget: int, *, max_block: int, delta: float
) -> list[list[int]]:
    """`blocks` with numpy operations over all tokens of a segment at each block size."""
    kept = []
    for row in scores:
        chosen = np.zeros(len(row), dtype=bool)
        chosen[np.argsort(-row, kind="stable")[:budget]] = True
        for start, end in itertools.pairwise(offsets.tolist()):
            quota = int(chosen[start:end].sum())
            if 1 < quota < end - start:
                chosen[start:end] = _segment_mask(
                    row[start:end].astype(np.float64), quota, max_block, delta
                )
        kept.append(chosen.nonzero()[0].tolist())
    return kept


def _segment_mask(row: Floats, quota: int, max_block: int, delta: float) -> NDArray[np.bool_]:
    length = len(row)
    order = np.argsort(-row, kind="stable")
    best = row[order[:quota]].sum()
    for size in range(min(max_block, quota), 1, -1):
        starts = np.arange(0, length, size)
        counts = np.minimum(starts + size, length) - starts
        means = (np.add.reduceat(row, starts) / counts).astype(np.float32)
        ranks = np.argsort(-means, kind="stable")
        filled = np.cumsum(counts[ranks])
        whole = int(np.searchsorted(filled, quota, side="right"))
        mask = np.zeros(length, dtype=bool)
        taken = np.zeros(len(starts), dtype=bool)
        taken[ranks[:whole]] = True
        mask |= np.repeat(taken, counts)
        rest = quota - (int(filled[whole - 1]) if whole else 0)
        if rest:
            first = int(starts[ranks[whole]])
            inner = row[first : first + size]
            mask[first + np.argsort(-inner, kind="stable")[:rest]] = True
        if row[mask].sum() >= delta * best:
            return mask
    mask = np.zeros(length, dtype=bool)
    mask[order[:quota]] = True
    return mask
