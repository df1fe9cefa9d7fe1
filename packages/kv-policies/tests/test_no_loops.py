"""The number of torch operations depends on no number of rows, heads, segments or tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kv_policies as kp
from kv_policies import clusters


class Count(TorchDispatchMode):
    """How many operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


LENGTHS = (1, 3, 9, 17, 40, 150)


def inputs(b: int, h: int, copies: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, segment scores, offsets and keys: the same piece over and over."""
    generator = torch.Generator().manual_seed(0)
    n = sum(LENGTHS)
    scores = torch.rand(n, generator=generator)
    keys = torch.randn(n, 4, generator=generator)
    segments = torch.rand(len(LENGTHS), generator=generator).repeat(copies)
    offsets = torch.tensor([0, *LENGTHS * copies]).cumsum(0)
    return (
        scores.repeat(b, h, copies),
        segments.repeat(b, h, 1),
        offsets,
        keys.repeat(b, h, copies, 1),
    )


def expand(scores: Tensor, segments: Tensor, offsets: Tensor, keys: Tensor) -> object:
    n, heads = scores.shape[2], scores.shape[1]
    return kp.expand_spans(segments, 0.2, offsets, n // 3, n=n, kv_heads=heads)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], object]] = {
    "top_tokens": lambda x, s, o, k: kp.top_tokens(x, x.shape[2] // 3),
    "top_segments": lambda x, s, o, k: kp.top_segments(s, x, o, x.shape[2] // 3),
    "masks": lambda x, s, o, k: kp.keep_window(x.shape[2], 9) | kp.keep_sinks(x.shape[2], 9),
    "stream_window": lambda x, s, o, k: kp.stream_window(x.shape[2], x.shape[2] // 3),
    "head_budgets": lambda x, s, o, k: kp.head_budgets(x, x.shape[2] * x.shape[1] // 3),
    "expand_spans": expand,
    "adaptive_blocks": lambda x, s, o, k: kp.adaptive_blocks(x, o, x.shape[2] // 3, delta=0.8),
    "greedy_clusters": lambda x, s, o, k: kp.greedy_clusters(k, o, 0.3),
    "threshold_for_budget": lambda x, s, o, k: kp.threshold_for_budget(k, o, x.shape[2] // 3),
    "merge": lambda x, s, o, k: kp.merge(
        k, k, (o[:-1]).repeat_interleave(o.diff()).expand(x.shape)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_many_operations_for_more_of_everything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("_SLAB", "_FETCHED"):  # follow the memory, not the tokens
        monkeypatch.setattr(clusters, size, 2**30)
    CALLS[name](*inputs(1, 1, 2))  # tables that are made once
    counts = []
    for b, h, copies in ((2, 2, 2), (2, 5, 2), (2, 2, 6), (4, 2, 2), (3, 3, 4)):
        with Count() as count:
            CALLS[name](*inputs(b, h, copies))
        counts.append(count.number)
    assert len(set(counts)) == 1, counts
