"""States that change with every token, remembered so that a draft's tokens can be taken back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from torch import Tensor

from kv_integration.storable import storable

DEPTH = 64  # tokens that can be taken back
State = TypeVar("State", bound=tuple[Tensor | None, ...])


@storable
class History(Generic[State]):
    """The state after each of the last `DEPTH` tokens, and that before them."""

    def __init__(self, first: State) -> None:
        self.states: list[State] = [first]

    def extend(self, states: Iterable[State]) -> None:
        """The states after each of the tokens that came."""
        self.states = [*self.states, *states][-DEPTH - 1 :]

    def back(self, tokens: int) -> State:
        """Forget the last `tokens`; the state that was before them.

        Raises:
            ValueError: so many are not remembered.
        """
        if tokens >= len(self.states):
            raise ValueError(
                f"cannot take back {tokens} tokens: {len(self.states) - 1} are remembered, at most "
                f"{DEPTH} and none from before rows were reordered"
            )
        del self.states[len(self.states) - tokens :]
        return self.states[-1]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [x for state in self.states for x in state if x is not None]
