"""RULER's eight needle-in-a-haystack tasks (`niah.py`)."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kv_bench.metrics.ruler import string_match_all
from kv_bench.tasks import words
from kv_bench.tasks.base import Sample
from kv_bench.tasks.fit import fill
from kv_bench.tasks.generated import GeneratedTask, grid, restart
from kv_bench.tasks.prose import first_words, insert, prose, sentence_starts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
CONTEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(step * 100 / 39) / 100 for step in range(40)]

Kind = Literal["words", "numbers", "uuids"]
DRAW: dict[str, Callable[[random.Random], str]] = {
    "words": words.draw_pair,
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class RulerNiah(GeneratedTask):
    """`keys` keys with `values` values each; `queries` of the keys are asked in one question.

    haystack: "noise", one line of five sentences over and over; "essay", prose; "needle", needles
    with other keys. depths: None for random places, as in RULER; else so many places from start
    to end take turns for the first needle that is asked for.
    """

    name: str
    haystack: Literal["noise", "essay", "needle"] = "essay"
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    depths: int | None = None
    metric: str = "string_match_all"

    @property
    def takes_text(self) -> bool:
        return self.haystack == "essay"

    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        index: int,
        length: int,
        rng: random.Random,
        text: str | None,
    ) -> Sample:
        keys = distinct(DRAW[self.key_kind], rng, max(self.keys, self.queries))
        drawn = distinct(DRAW[self.value_kind], rng, len(keys) * self.values)
        values = {key: drawn[at :: len(keys)] for at, key in enumerate(keys)}
        asked = keys[: self.queries]
        needles = [self.needle(key, value) for key in keys for value in values[key]]
        depth = None if self.depths is None else grid(index, self.depths)
        essay = prose(text).split() if self.haystack == "essay" else []

        def build(units: int) -> Sample:
            again = restart(rng)
            if self.haystack == "essay":
                context, depths = hide_in_prose(essay, units, needles, depth, again)
            else:
                lines = self.lines(units, keys, again)
                context, depths = hide_in_lines(lines, needles, depth, again)
            return self.sample(str(index), length, context, asked, values, depths)

        least = 0 if self.haystack == "essay" else len(needles)
        return fill(build, tokenizer, length, least=least, unit=1.5 if essay else 30)

    def needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def lines(self, count: int, taken: Sequence[str], rng: random.Random) -> list[str]:
        """The haystack's lines; those of other needles have none of the keys `taken`."""
        if self.haystack == "noise":
            return [NOISE] * count
        seen = set(taken)
        lines: list[str] = []
        while len(lines) < count:
            key = DRAW[self.key_kind](rng)
            if key not in seen:
                seen.add(key)
                lines.append(self.needle(key, DRAW[self.value_kind](rng)))
        return lines

    def sample(
        self,
        id: str,
        length: int,
        context: str,
        asked: Sequence[str],
        values: dict[str, list[str]],
        depths: Sequence[float],
    ) -> Sample:
        single = self.queries * self.values == 1
        kind = self.value_kind.removesuffix("s") if single else self.value_kind
        *others, last = asked
        query = f"{', '.join(others)}, and {last}" if others else last

        def fit(template: str) -> str:
            if single:  # RULER's own way from plural to singular
                template = template.replace("Some", "A").replace("are all", "is")
                template = template.replace("are", "is")
            return template.format(kind=kind, query=query)

        return Sample(
            id=id,
            context=fit(CONTEXT) + context,
            questions=(fit(QUESTION),),
            answers=(tuple(value for key in asked for value in values[key]),),
            answer_prefix=fit(ANSWER_PREFIX),
            max_new_tokens=128,
            extra={"length": length, "depth": depths[0], "depths": list(depths)},
        )

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return string_match_all(prediction, right)


def distinct(draw: Callable[[random.Random], str], rng: random.Random, count: int) -> list[str]:
    """`count` draws that differ from each other."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


def hide_in_prose(
    essay: Sequence[str],
    count: int,
    needles: Sequence[str],
    depth: float | None,
    rng: random.Random,
) -> tuple[str, list[float]]:
    """The first `count` words with the needles between sentences, and the needles' depths."""
    depths = rng.sample(DEPTHS, len(needles))
    if depth is not None:
        depths[0] = depth
    text = first_words(essay, count)
    starts = sentence_starts(text)
    offsets = [starts[int((len(starts) - 1) * at)] for at in depths]
    return insert(text, needles, offsets), depths


def hide_in_lines(
    lines: Sequence[str], needles: Sequence[str], depth: float | None, rng: random.Random
) -> tuple[str, list[float]]:
    """The lines with the needles between them, and the needles' depths."""
    places = rng.sample(range(len(lines)), len(needles))
    if depth is not None:
        places[0] = round(depth * len(lines))
    mixed = list(lines)
    for at in sorted(range(len(needles)), key=lambda at: -places[at]):
        mixed.insert(places[at], needles[at])
    return "\n".join(mixed), [place / len(lines) for place in places]


NIAH_TASKS = (
    RulerNiah("ruler_niah_single_1", haystack="noise"),
    RulerNiah("ruler_niah_single_2"),
    RulerNiah("ruler_niah_single_3", value_kind="uuids"),
    RulerNiah("ruler_niah_multikey_1", keys=4),
    RulerNiah("ruler_niah_multikey_2", haystack="needle"),
    RulerNiah("ruler_niah_multikey_3", haystack="needle", key_kind="uuids", value_kind="uuids"),
    RulerNiah("ruler_niah_multivalue", values=4),
    RulerNiah("ruler_niah_multiquery", queries=4),
)
