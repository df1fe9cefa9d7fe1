"""Full KV: everything is kept. The reference that every other method is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_integration.entries import RowEntries
from kv_integration.kept import hold
from kv_integration.method import LayerState, Method, Plan, Row


@dataclass(frozen=True)
class FullKV(Method):
    """Keep every token of the prompt on the device, as transformers' DynamicCache does."""

    @property
    def name(self) -> str:
        return "full"

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return hold([RowEntries.equal(row.keys, row.values) for row in rows])
