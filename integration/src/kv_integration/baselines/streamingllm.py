"""StreamingLLM: the first tokens and a window that rolls on while tokens are generated.

Source: "Efficient Streaming Language Models with Attention Sinks", section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kv_integration.bounded import Bounded, capacities
from kv_integration.budget import check_budget
from kv_integration.method import LayerState, Method, Plan, Row
from kv_integration.storable import storable

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Attend the first `sinks` tokens and the latest ones, `budget` in all, generated included.

    Args:
        budget: entries per KV head (int) or share of the prompt (float in (0, 1]).
        sinks: first tokens that stay, 4 in the paper; less than the budget.

    Keys stay rotated at their original positions; the paper counts positions within the cache,
    which differs for the sinks alone. Tokens that come together, as in a later turn, see the
    window as it was before them, and each other.
    """

    budget: int | float = 1024
    sinks: int = 4

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {self.sinks}")

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return Rolling(rows, capacities(self.budget, rows), self.sinks)


@storable
class Rolling(Bounded):
    """A token's slot follows from its position: the sinks' slots first, then a ring."""

    def __init__(self, rows: Sequence[Row], capacity: Sequence[int], sinks: int) -> None:
        super().__init__(rows, capacity)
        self.sinks = [min(sinks, n - 1) for n in self.capacity]
        for number, row in enumerate(rows):
            self.absorb(number, row.queries, row.keys, row.values, row.scale)

    def place(self) -> Tensor | int:
        slots = [
            seen if seen < self.sinks[row] else self._ring(row, seen)
            for row, seen in enumerate(self.seen)
        ]
        if min(slots) == max(slots):
            return slots[0]
        return torch.tensor(slots, device=self.keys.device)[:, None]

    def absorb(self, row: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        new, seen = keys.shape[2], self.seen[row]
        position = torch.arange(seen, seen + new, device=keys.device)
        stays = position < self.sinks[row]
        stays |= position >= seen + new - (self.capacity[row] - self.sinks[row])
        position = position[stays]
        slots = torch.where(position < self.sinks[row], position, self._ring(row, position))
        self.keys[row, :, slots] = keys[0, :, stays]
        self.values[row, :, slots] = values[0, :, stays]
        self.seen[row] = seen + new
        self.used[row] = min(seen + new, self.capacity[row])

    def _ring(self, row: int, position: Position) -> Position:
        """Slot of a token after the sinks."""
        sinks = self.sinks[row]
        return (position - sinks) % (self.capacity[row] - sinks) + sinks

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.sinks = [self.sinks[row] for row in rows.tolist()]
