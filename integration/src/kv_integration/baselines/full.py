"""Full KV: everything is kept. The reference that every other method is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_integration.buffer import KVBuffer
from kv_integration.method import Kept, LayerState, Method, Plan, Row


@dataclass(frozen=True)
class FullKV(Method):
    """Keep every token of the prompt on the device, as transformers' DynamicCache does."""

    budget: int | float = 1.0

    @property
    def name(self) -> str:
        return "full"

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        return Kept(KVBuffer.stack([(row.keys, row.values) for row in rows]))
