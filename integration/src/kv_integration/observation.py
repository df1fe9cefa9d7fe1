"""The observation window: the prompt's last queries say how important its earlier tokens are."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kv_integration.budget import split_window
from kv_integration.method import Row
from kv_score import pool, window_attention

Pooling = Literal["none", "avg", "max"]


def check_observation(window: int, pooling: str, kernel: int) -> None:
    """Raise unless the options of `observed_scores` make sense."""
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if pooling not in ("none", "avg", "max"):
        raise ValueError(f"pooling must be 'none', 'avg' or 'max', got {pooling!r}")
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel must be odd and at least 1, got {kernel}")


def split_observed(row: Row, budget: int, window: int) -> tuple[int, int]:
    """`split_window`, the window no longer than the queries that the row brings.

    Compressed again it brings those of the tokens that came since the last time.
    """
    return split_window(budget, min(window, row.queries.shape[2]))


def observed_scores(
    row: Row,
    window: int,
    *,
    pooling: Pooling,
    kernel: int,
    reduce: Literal["layer", "kv_head"] = "layer",
) -> Tensor:
    """Attention that the last `window` queries pay to each earlier token, over heads, pooled.

    Pooling over `kernel` neighbours, as SnapKV does with its window scores, keeps what stands
    beside a token that is looked at: what follows it is often needed one step later, when the
    window can no longer ask for it.

    Returns:
        float32[1, 1, T - window], the mean over all heads of the sum over the window's queries;
        float32[1, H_kv, T - window] with the mean over each KV head's group.
    """
    scores = window_attention(row.queries[:, :, -window:], row.keys, scale=row.scale, reduce=reduce)
    return pool(scores, pooling, kernel=kernel)
