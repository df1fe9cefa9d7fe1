"""Needle in a haystack in the words that the embedded model knows.

It was trained on prose with sentences like "The magic number for list is 123456.", and on turns
that ask for one of them each. So these tasks are RULER's kinds of needles in that form, and several
needles are asked for in several turns on the same cache, as in a chat about one document.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from kv_bench.tasks.base import Sample
from kv_bench.tasks.fit import fill
from kv_bench.tasks.generated import GeneratedTask, grid
from kv_bench.tasks.prose import insert, prose, sentence_starts
from kv_integration import haystack
from kv_integration.answer import is_correct

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD = re.compile(r"\s*\S+")


@dataclass(frozen=True)
class Niah(GeneratedTask):
    """`keys` keys with `values` numbers each in prose; one turn per key that is asked for.

    The prose starts at a drawn sentence. The first key's needle takes turns between `depths` places
    from start to end, all others lie at random. An answer is right if the first number in it is one
    of the key's.
    """

    name: str
    keys: int = 1
    values: int = 1
    turns: int = 1
    depths: int = 5
    metric: str = "accuracy"

    def __post_init__(self) -> None:
        if not 1 <= self.turns <= self.keys:
            raise ValueError(f"turns must be from 1 to keys = {self.keys}, got {self.turns}")

    @property
    def takes_text(self) -> bool:
        return True

    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        index: int,
        length: int,
        rng: random.Random,
        text: str | None,
    ) -> Sample:
        body = prose(text)
        start = rng.choice(sentence_starts(body)[:-1])
        words = WORD.findall(f"\n\n{body[start:]}\n\n{body[:start]}")
        numbers = self.draw(rng, known_keys(tokenizer))
        needles = [
            haystack.NEEDLE.format(key=key, number=number)
            for key, values in numbers.items()
            for number in values
        ]
        depths = [grid(index, self.depths), *(rng.random() for _ in needles[1:])]
        asked = list(numbers)[: self.turns]
        if self.turns > 1:
            rng.shuffle(asked)
        questions = [haystack.QUESTION.format(key=key) for key in asked]

        def build(count: int) -> Sample:
            part = "".join(islice(cycle(words), count)).lstrip()
            starts = sentence_starts(part)
            offsets = [nearest(starts, depth * len(part)) for depth in depths]
            return Sample(
                id=str(index),
                context=insert(part, needles, offsets),
                questions=(f"\n\n{questions[0]}", *questions[1:]),
                answers=tuple(tuple(numbers[key]) for key in asked),
                max_new_tokens=12,
                extra={"length": length, "depth": depths[0], "depths": depths},
            )

        return fill(build, tokenizer, length, least=0, unit=1.5)

    def draw(self, rng: random.Random, words: Sequence[str]) -> dict[str, list[str]]:
        """Different keys with different numbers, in pairs that training never put together."""
        if len(words) < self.keys:
            raise ValueError(
                f"{self.name} takes {self.keys} keys, but the model's keys.json has {len(words)}"
            )
        found: dict[str, list[str]] = {}
        taken: set[str] = set()
        while len(found) < self.keys or any(len(of) < self.values for of in found.values()):
            key, number = haystack.draw_pair(rng, words)
            full = len(found) == self.keys and key not in found
            if not full and number not in taken and len(found.get(key, [])) < self.values:
                found.setdefault(key, []).append(number)
                taken.add(number)
        return found

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return float(any(is_correct(prediction, number) for number in right))


def known_keys(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The keys that come with the tokenizer's model, or common words."""
    return haystack.read_keys(Path(tokenizer.name_or_path))


def nearest(starts: Sequence[int], at: float) -> int:
    """The one of `starts` that is nearest to `at`."""
    return min(starts, key=lambda start: abs(start - at))


NIAH_TASKS = (
    Niah("niah_single"),
    Niah("niah_multikey", keys=4),
    Niah("niah_multivalue", values=4),
    Niah("niah_multiquery", keys=4, turns=4),
    Niah("niah_multiturn", keys=8, turns=8),
)
