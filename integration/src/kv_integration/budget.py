"""What a budget means: how many entries of the prompt one decoding step may attend, per KV head."""

from __future__ import annotations

import math


class BudgetTooSmallError(ValueError):
    """A budget is less than what a method must attend of this prompt; `least` would do."""

    def __init__(self, text: str, *, least: int) -> None:
        super().__init__(text)
        self.least = least


def check_budget(budget: int | float, name: str = "budget") -> None:
    """Raise unless `budget` is a positive number of entries or a share of the prompt in (0, 1].

    An `int` counts entries, a `float` is a share, so `1` is one entry and `1.0` the whole prompt.
    name: of the argument, for the error.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"{name} must be an int or a float, got {budget!r}")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"{name} as a number of entries must be at least 1, got {budget}")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(f"{name} as a share of the prompt must be in (0, 1], got {budget}")


def budget_entries(budget: int | float, prompt_tokens: int) -> int:
    """Entries that `budget` grants of a prompt: never more than the prompt, never less than one."""
    check_budget(budget)
    granted = budget if isinstance(budget, int) else math.floor(budget * prompt_tokens)
    return min(max(granted, 1), prompt_tokens)


def split_window(budget: int, window: int) -> tuple[int, int]:
    """Share `budget` between the latest tokens, always attended, and what is selected before them.

    The window gets its whole size while that is at most a quarter of the budget, else a quarter.
    Its queries look at what stands just before them more than at anything else, so a window that
    reaches beyond the question draws the selection to itself: with half of a small budget what is
    asked for is lost (`benchmarks/results/sweep`).

    Returns:
        `(window, selected)`, which sum to `budget`.
    """
    kept = min(window, max(budget // 4, 1))
    return kept, budget - kept
