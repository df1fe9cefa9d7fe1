"""What a budget means: how many entries of the prompt one decoding step may attend, per KV head."""

from __future__ import annotations

import math


class BudgetTooSmallError(ValueError):
    """A budget is less than what a method must attend of this prompt; `least` would do."""

    def __init__(self, text: str, *, least: int) -> None:
        super().__init__(text)
        self.least = least


def check_budget(budget: int | float) -> None:
    """Raise unless `budget` is a positive number of entries or a share of the prompt in (0, 1].

    An `int` counts entries, a `float` is a share, so `1` is one entry and `1.0` the whole prompt.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"budget must be an int or a float, got {budget!r}")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"budget as a number of entries must be at least 1, got {budget}")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(f"budget as a share of the prompt must be in (0, 1], got {budget}")


def budget_entries(budget: int | float, prompt_tokens: int) -> int:
    """Entries that `budget` grants of a prompt: never more than the prompt, never less than one."""
    check_budget(budget)
    granted = budget if isinstance(budget, int) else math.floor(budget * prompt_tokens)
    return min(max(granted, 1), prompt_tokens)


def split_window(budget: int, window: int) -> tuple[int, int]:
    """Share `budget` between the latest tokens, always attended, and what is selected before them.

    The window gets its whole size while that leaves at least half of the budget to the selection,
    else half of the budget: a method with a small budget must not spend it on the question alone.

    Returns:
        `(window, selected)`, which sum to `budget`.
    """
    kept = min(window, max(budget // 2, 1))
    return kept, budget - kept
