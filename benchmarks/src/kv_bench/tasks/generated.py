"""Tasks whose samples are generated at a length."""

from __future__ import annotations

import random
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kv_bench.tasks.base import Sample, Samples, Task, check_counts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GeneratedTask(Task):
    """Draws sample by sample: which one depends on task, length, seed and index alone."""

    default_length: ClassVar[int] = 4096
    default_count: ClassVar[int] = 500

    @property
    def takes_text(self) -> bool:
        """Whether the haystack is prose that the caller may choose."""
        return False

    def samples(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int | None = None,
        count: int | None = None,
        seed: int = 0,
        data: str | Path | None = None,
        text: str | None = None,
    ) -> Samples:
        check_counts(length, count)
        if data is not None:
            raise ValueError(f"{self.name} is generated and takes no data, got {str(data)!r}")
        if text is not None and not self.takes_text:
            raise ValueError(f"{self.name} has a haystack of its own and takes no text")
        tokens = length or self.default_length

        def make(index: int) -> Sample:
            rng = random.Random(f"{self.name}:{tokens}:{seed}:{index}")
            return self.generate(tokenizer, index, tokens, rng, text)

        return Samples([str(index) for index in range(count or self.default_count)], make)

    @abstractmethod
    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        index: int,
        length: int,
        rng: random.Random,
        text: str | None,
    ) -> Sample:
        """Sample number `index`, of at most `length` tokens with its answers."""


def restart(rng: random.Random) -> random.Random:
    """A generator that goes on from where `rng` is, while `rng` stays there.

    A sample is built at several sizes; what is drawn per size must not depend on the others.
    """
    copy = random.Random()
    copy.setstate(rng.getstate())
    return copy


def grid(index: int, depths: int) -> float:
    """Depth of sample `index` when `depths` places from start to end take turns; one is the middle.

    Raises:
        ValueError: `depths` is below 1.
    """
    if depths < 1:
        raise ValueError(f"depths must be at least 1, got {depths}")
    return 0.5 if depths == 1 else index % depths / (depths - 1)
