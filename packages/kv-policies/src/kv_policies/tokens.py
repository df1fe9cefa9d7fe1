"""Which tokens are kept, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kv_policies import _check
from kv_policies._select import indices_of, top_mask


def top_tokens(
    scores: Float[Tensor, "B H N"],
    budget: int | Sequence[int],
    *,
    protected: Bool[Tensor, "*rows N"] | None = None,
    check: bool = True,
) -> Int64[Tensor, "B H K"]:
    """`indices = sort(topk(scores, K))`, `K = min(budget, N)`: the best tokens of each head.

    Args:
        scores: [B, H, N], higher = keep, -inf = never.
        budget: entries per row and head, at least 0; or one such int for each of the B rows.
        protected: bool, [N] or anything that broadcasts to [B, H, N]: tokens that are kept
            whatever their score, and count in the budget. A score of -inf still forbids them.
        check: also check values, which makes the host wait for a GPU. Without it NaN or too many
            protected tokens give an unspecified selection.

    Returns:
        int64[B, H, K], `K = min(budget, N)` (the largest budget), ascending, -1 padded where fewer
        than K tokens are granted or allowed. Of equal scores the earlier token is kept.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape or device, negative budget, NaN or +inf in `scores`, more
            protected tokens than the budget holds.

    Source: the top-k step of SentenceKV (section 4.1), SnapKV and H2O.
    """
    keys = _check.scores("scores", scores, check=check)
    budgets = _check.budgets(budget, keys.shape[0])
    if protected is not None:
        keys = _protect(keys, protected, budgets, check=check)
    most = min(max(budgets, default=0), keys.shape[-1])
    return indices_of(top_mask(keys, most if len(set(budgets)) <= 1 else budgets), most)


def _protect(keys: Tensor, protected: Tensor, budgets: Sequence[int], *, check: bool) -> Tensor:
    if not isinstance(protected, Tensor):
        raise TypeError(f"protected must be a torch.Tensor, got {type(protected).__name__}")
    _check.dtype("protected", protected, torch.bool)
    _check.same_device("protected", protected, "scores", keys)
    sizes = (*[1] * (3 - protected.ndim), *protected.shape)
    fits = len(sizes) == 3 and sizes[2] == keys.shape[2]
    if not fits or any(s not in (1, k) for s, k in zip(sizes, keys.shape, strict=True)):
        raise ValueError(
            f"protected must broadcast to the shape of scores, {list(keys.shape)}, "
            f"got {list(protected.shape)}"
        )
    kept = protected.expand(keys.shape) & (keys > -math.inf)
    if check and kept.numel():
        for budget, most in zip(budgets, kept.sum(-1).amax(-1).tolist(), strict=True):
            if most > budget:
                raise ValueError(
                    f"protected must hold at most budget = {budget} tokens, got {most}"
                )
    return keys.masked_fill(kept, math.inf)


def keep_window(
    n: int, window: int, *, device: torch.device | str | None = None
) -> Bool[Tensor, " n"]:
    """`mask[t] = t >= n - window`: the last tokens, all of them when `window > n`.

    A mask, so that it combines by `|` with `keep_sinks` and serves as `protected`.

    Raises:
        TypeError: `n` or `window` is no int.
        ValueError: one of them is negative.

    Source: the observation window of SnapKV, SentenceKV (4.1) and SABlock (III-A).
    """
    n = _check.integer("n", n, least=0)
    window = _check.integer("window", window, least=0)
    return torch.arange(n, device=device) >= n - min(window, n)


def keep_sinks(
    n: int,
    sinks: int,
    *,
    starts: Int64[Tensor, " B"] | None = None,
    device: torch.device | str | None = None,
    check: bool = True,
) -> Bool[Tensor, " n"] | Bool[Tensor, "B 1 n"]:
    """`mask[t] = t < sinks`: the first tokens, all of them when `sinks > n`.

    Args:
        n: number of tokens.
        sinks: how many to keep.
        starts: int64[B] in [0, n], position of the first real token of each left-padded row. The
            mask is then bool[B, 1, n] with `starts <= t < starts + sinks`.
        device: of the mask; that of `starts` where it is given.
        check: also check the values of `starts`, which makes the host wait for a GPU.

    Raises:
        TypeError: `n` or `sinks` is no int, `starts` no int64.
        ValueError: one of them is negative, `starts` has not one dimension or lies outside [0, n].

    Source: StreamingLLM, section 3.2.
    """
    n = _check.integer("n", n, least=0)
    sinks = min(_check.integer("sinks", sinks, least=0), n)
    if starts is None:
        return torch.arange(n, device=device) < sinks
    from_start = torch.arange(n, device=starts.device) - _starts(starts, n, check=check)
    return (from_start >= 0) & (from_start < sinks)


def stream_window(
    n: int,
    budget: int,
    *,
    sinks: int = 4,
    starts: Int64[Tensor, " B"] | None = None,
    device: torch.device | str | None = None,
    check: bool = True,
) -> Int64[Tensor, "rows 1 K"]:
    """`indices = {0 .. sinks - 1} and the last budget - sinks tokens`: StreamingLLM's selection.

    Args:
        n: number of tokens.
        budget: entries per row, at least 0. With `budget < sinks` the first `budget` tokens stay.
        sinks: first tokens that are always kept.
        starts: int64[B] in [0, n], position of the first real token of each left-padded row.
        device: of the indices; that of `starts` where it is given.
        check: also check the values of `starts`, which makes the host wait for a GPU.

    Returns:
        int64[B, 1, K], or [1, 1, K] without `starts`, `K = min(budget, n)`, ascending, -1 padded
        in rows that have fewer real tokens.

    Raises:
        TypeError: `n`, `budget` or `sinks` is no int, `starts` no int64.
        ValueError: one of them is negative, `starts` has not one dimension or lies outside [0, n].

    Source: StreamingLLM, section 3.2.
    """
    budget = _check.integer("budget", budget, least=0)
    sinks = _check.integer("sinks", sinks, least=0)
    first = keep_sinks(n, min(sinks, budget), starts=starts, device=device, check=check)
    kept = first | keep_window(n, max(budget - sinks, 0), device=first.device)
    if starts is None:
        kept = kept[None, None]
    else:
        kept = kept & (torch.arange(n, device=starts.device) >= starts[:, None, None])
    return indices_of(kept, min(budget, n))


def _starts(starts: Tensor, n: int, *, check: bool) -> Tensor:
    """`starts` as [B, 1, 1]."""
    _check.shape("starts", starts, (None,), "[B]")
    _check.dtype("starts", starts, torch.int64)
    if check:
        _check.refuse("starts", starts, (starts < 0) | (starts > n), f"in [0, {n}]")
    return starts[:, None, None]
