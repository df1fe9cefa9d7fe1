"""The clustering threshold that meets a budget."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kv_policies import _check
from kv_policies.clusters import Chunks, check_inputs


class Threshold(NamedTuple):
    """What `threshold_for_budget` found for each row and head."""

    theta: Float[Tensor, "B H"]
    """float32, to be passed to `greedy_clusters`."""
    entries: Int64[Tensor, "B H"]
    """Clusters there are at `theta`."""
    excess: Int64[Tensor, "B H"]
    """Entries above the budget: 0 where it is met, more where even theta = -1 does not meet it."""


def threshold_for_budget(
    keys: Float[Tensor, "B H T D"],
    offsets: Int64[Tensor, "*rows S1"],
    budget: int,
    *,
    steps: int = 12,
    valid: Bool[Tensor, "B T"] | None = None,
    check: bool = True,
) -> Threshold:
    """`theta = bisect max {theta : clusters(theta) <= budget}` in [-1, 1], per row and head.

    `theta` is one at which the clusters were counted and meet the budget, never an estimate, and
    1 (nothing merged) wherever the tokens themselves fit. The number of clusters need not rise
    with theta, so a larger theta that meets the budget as well may exist; but theta never falls
    when the budget grows. Where one entry per chunk is still too many, theta is -1 and `excess`
    says by how many.

    Args:
        keys, offsets, valid: as for `greedy_clusters`. Products within chunks are kept between the
            steps, at most as many numbers as `keys` has; the others are taken anew in each step.
        budget: entries per row and head, at least 0.
        steps: bisection steps, at least 0; theta is found to within 2 ** (1 - steps).
        check: also check values.

    Raises:
        As `greedy_clusters`; ValueError for a negative `budget` or `steps`.

    Source: SemantiCache picks theta by hand (Table 5); the budgets of Table 1 need this.
    """
    budget = _check.integer("budget", budget, least=0)
    steps = _check.integer("steps", steps, least=0)
    table, valid = check_inputs(keys, offsets, valid, check=check)
    budget = min(budget, keys.shape[2])
    chunks = Chunks(keys, table, valid, keep=keys.numel())
    low = keys.new_full(keys.shape[:2], -1.0, dtype=torch.float32)
    high = -low
    count = torch.zeros_like(low, dtype=torch.int64)
    for _ in range(steps):
        middle = (low + high) / 2
        found = chunks.count(middle)
        met = found <= budget
        low, high = torch.where(met, middle, low), torch.where(met, high, middle)
        count = torch.where(met, found, count)
    unmet = low == -1
    if bool(unmet.any()):
        count = torch.where(unmet, chunks.count(low), count)
    tokens = valid.sum(-1, keepdim=True).expand_as(count)
    low = torch.where(tokens <= budget, 1.0, low)
    count = torch.where(tokens <= budget, tokens, count)
    return Threshold(low, count, (count - budget).clamp(min=0))
