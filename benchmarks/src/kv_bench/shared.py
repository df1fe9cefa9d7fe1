"""Several methods behind one prefill: the prompt passes the model once, each method answers it.

`Shared` is a method whose state of a layer holds one state per method. `choose` says which of them
the next tokens belong to, over as many turns as come; `crop`, which forgets these tokens, lets that
state go, since a method need not be able to crop its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from kv_integration import LayerState, Method, Plan, Row
from kv_integration.method import Context


class Shared(Method):
    """The methods `methods`, all made from the same prompt, one of them active at a time."""

    def __init__(self, methods: Sequence[Method]) -> None:
        if not methods:
            raise ValueError("methods must hold at least one method")
        self.methods = list(methods)
        self.active = 0

    @property
    def observe(self) -> int:  # type: ignore[override]
        return max(method.observe for method in self.methods)

    @property
    def accumulates(self) -> bool:  # type: ignore[override]
        # A prompt that is held until its surprisal is known loses what was accumulated.
        return any(m.accumulates for m in self.methods) and not self.needs_surprisal

    @property
    def needs_surprisal(self) -> bool:  # type: ignore[override]
        return any(method.needs_surprisal for method in self.methods)

    @property
    def rope(self) -> Literal["prompt", "all"] | None:  # type: ignore[override]
        wanted = {method.rope for method in self.methods}
        return "all" if "all" in wanted else "prompt" if "prompt" in wanted else None

    @property
    def holds_rope(self) -> bool:
        return self.methods[self.active].holds_rope

    @property
    def name(self) -> str:
        return self.methods[self.active].name

    @property
    def budget(self) -> int | float:  # type: ignore[override]
        return self.methods[self.active].budget

    def bound(self, model: PreTrainedModel) -> Shared:
        self.methods = [method.bound(model) for method in self.methods]
        return self  # whose `active` the owner goes on choosing

    def choose(self, index: int) -> None:
        """The next tokens go to method `index`."""
        self.active = index

    def begin(self, ids: Sequence[Tensor], context: Context) -> Plan:
        return SharedPlan(self, [method.begin(ids, context) for method in self.methods])

    def compress(self, rows: Sequence[Row], plan: Plan) -> LayerState:
        if not isinstance(plan, SharedPlan):
            raise TypeError(f"plan must come from begin, got {plan!r}")
        states: list[LayerState | None] = []
        for method, part in zip(self.methods, plan.parts, strict=True):
            own = [replace(row, queries=_latest(row.queries, method.observe)) for row in rows]
            states.append(method.compress(own, part))
        return SharedState(self, states)


class SharedPlan(Plan):
    """One plan per method."""

    def __init__(self, owner: Shared, parts: Sequence[Plan]) -> None:
        super().__init__()
        self.owner, self.parts = owner, parts

    def finish(self, surprisal: Sequence[Tensor]) -> None:
        for part in self.parts:
            part.finish(surprisal)

    def advance(self, ids: Tensor, valid: Tensor | None) -> None:
        self.parts[self.owner.active].advance(ids, valid)

    def select_rows(self, rows: Tensor) -> None:
        for part in self.parts:
            part.select_rows(rows)

    @property
    def nbytes(self) -> int:
        return self.parts[self.owner.active].nbytes


class SharedState(LayerState):
    """One state per method; None once its tokens were cropped."""

    def __init__(self, owner: Shared, states: list[LayerState | None]) -> None:
        self.owner, self.states = owner, states

    def _active(self) -> LayerState:
        state = self.states[self.owner.active]
        if state is None:
            raise ValueError(f"method {self.owner.active} has answered already")
        return state

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        return self._active().looks_ahead

    def expect(self, queries: Tensor, *, scale: float) -> None:
        self._active().expect(queries, scale=scale)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None, scale: float
    ) -> Tensor:
        return self._active().step(queries, keys, values, valid=valid, scale=scale)

    def entries(self) -> Tensor:
        return self._active().entries()

    def nbytes(self) -> dict[str, int]:
        return self._active().nbytes()

    def details(self) -> dict[str, Any]:
        return self._active().details()

    def traffic(self) -> dict[str, int]:
        return self._active().traffic()

    def crop(self, tokens: int) -> None:
        self.states[self.owner.active] = None

    def select_rows(self, rows: Tensor) -> None:
        for state in self.states:
            if state is not None:
                state.select_rows(rows)


def _latest(queries: Tensor, observe: int) -> Tensor:
    """What a method that observes so many queries would have got by itself."""
    return queries[:, :, max(queries.shape[2] - max(observe, 1), 0) :]
