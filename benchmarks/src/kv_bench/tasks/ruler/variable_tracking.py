"""RULER's variable tracking (`variable_tracking.py`): one chain of four hops in noise."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kv_bench.metrics.ruler import string_match_all
from kv_bench.tasks.base import Sample
from kv_bench.tasks.fit import fill, largest
from kv_bench.tasks.generated import GeneratedTask, restart
from kv_bench.tasks.ruler.niah import NOISE, distinct

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} "
    "variables are assigned the value {query}, they are: "
)
EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class VariableTracking(GeneratedTask):
    """Which variables got a value, through `hops` assignments; a solved example comes first."""

    name: str = "ruler_vt"
    hops: int = 4
    metric: str = "string_match_all"

    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        index: int,
        length: int,
        rng: random.Random,
        text: str | None,
    ) -> Sample:
        example = self.example(tokenizer, rng)
        names = self.variables(rng, letters=5)
        value = str(rng.randint(10000, 99999))

        def build(lines: int) -> Sample:
            context = example + CONTEXT + hide_chain(chain(names, value), lines, restart(rng))
            return Sample(
                id=str(index),
                context=context,
                questions=(QUESTION.format(query=value),),
                answers=(tuple(names),),
                answer_prefix=ANSWER_PREFIX.format(num_v=len(names), query=value),
                max_new_tokens=30,
                extra={"length": length},
            )

        return fill(build, tokenizer, length, least=len(names), unit=25)

    def variables(self, rng: random.Random, *, letters: int) -> list[str]:
        return distinct(
            lambda rng: "".join(rng.choices(string.ascii_uppercase, k=letters)), rng, self.hops + 1
        )

    def example(self, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> str:
        """A shorter task with its answer, of at most 500 tokens if that is enough for the chain."""
        names, value = self.variables(rng, letters=3), str(rng.randint(10000, 99999))

        def solved(lines: int) -> str:
            hidden = hide_chain(chain(names, value), lines, restart(rng))
            prefix = ANSWER_PREFIX.format(num_v=len(names), query=value)
            asked = f"{CONTEXT}{hidden}{QUESTION.format(query=value)}{prefix}"
            return f"{asked} {' '.join(names)}\n\n"

        def size(lines: int) -> int:
            return len(tokenizer(solved(lines), add_special_tokens=False)["input_ids"])

        least = len(names)
        return solved(largest(size, EXAMPLE_TOKENS, least=least, unit=25) or least)

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return string_match_all(prediction, right)


def chain(names: Sequence[str], value: str) -> list[str]:
    """Assignments that carry `value` from the first variable to the last."""
    hops = [f"VAR {after} = VAR {before} " for before, after in pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]


def hide_chain(assignments: Sequence[str], lines: int, rng: random.Random) -> str:
    """`lines` lines of noise with the assignments between them, in their order."""
    mixed = [NOISE] * lines
    places = sorted(rng.sample(range(lines), len(assignments)))
    for at, (place, assignment) in enumerate(zip(places, assignments, strict=True)):
        mixed.insert(place + at, assignment)
    return "\n".join(mixed).replace(". \n", ".\n")
