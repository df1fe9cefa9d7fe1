"""RULER's common words and frequent words (`common_words_extraction.py`,
`freq_words_extraction.py`)."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_bench.metrics.ruler import string_match_all
from kv_bench.tasks import words
from kv_bench.tasks.base import Sample
from kv_bench.tasks.fit import fill
from kv_bench.tasks.generated import GeneratedTask, restart
from kv_bench.tasks.ruler.niah import distinct

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
# Below this length RULER repeats common and other words (6, 1) times, not (30, 3), and takes a
# shorter example.
SHORT = 4096

FREQUENT_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. "
)
FREQUENT_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
LETTERS = 6
NOISE_WORD = "..."
LEAST_FREQUENT = 60  # words below which the third and the fourth may appear equally often


@dataclass(frozen=True)
class CommonWords(GeneratedTask):
    """Ten words appear more often than all others in a numbered list; a solved list comes first."""

    name: str = "ruler_cwe"
    metric: str = "string_match_all"

    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        index: int,
        length: int,
        rng: random.Random,
        text: str | None,
    ) -> Sample:
        pool = list(words.single_words())
        rng.shuffle(pool)
        small = length < SHORT
        solved = pool[-20:] if small else pool[-40:]
        numbers = " ".join(f"{at}. {word}" for at, word in enumerate(solved[:COMMON], 1))
        listed = word_list(solved, *((3, 1) if small else (10, 3)), rng)
        example = f"{COMMON_CONTEXT}{listed}{COMMON_QUESTION}{COMMON_PREFIX} {numbers}\n"

        def build(count: int) -> Sample:
            again = restart(rng)
            taken = pool[:count]
            taken += distinct(words.draw_pair, again, count - len(taken))
            listed = word_list(taken, *((6, 1) if small else (30, 3)), again)
            return Sample(
                id=str(index),
                context=example + COMMON_CONTEXT + listed,
                questions=(COMMON_QUESTION,),
                answers=(tuple(taken[:COMMON]),),
                answer_prefix=COMMON_PREFIX,
                max_new_tokens=120,
                extra={"length": length, "words": count},
            )

        return fill(build, tokenizer, length, least=COMMON + 1, unit=8 if small else 24)

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return string_match_all(prediction, right)


def word_list(taken: Sequence[str], common: int, other: int, rng: random.Random) -> str:
    """A shuffled numbered list: the first ten words `common` times, the others `other` times."""
    listed = [*taken[:COMMON]] * common + [*taken[COMMON:]] * other
    rng.shuffle(listed)
    return " ".join(f"{at}. {word}" for at, word in enumerate(listed, 1))


@dataclass(frozen=True)
class FrequentWords(GeneratedTask):
    """Coded words whose number falls with their rank by a zeta distribution; the first is noise."""

    name: str = "ruler_fwe"
    alpha: float = 2.0
    metric: str = "string_match_all"

    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        index: int,
        length: int,
        rng: random.Random,
        text: str | None,
    ) -> Sample:
        new_tokens = 50
        size = max((length - new_tokens) // 50, 5)
        coded = distinct(
            lambda rng: "".join(rng.choices(string.ascii_lowercase, k=LETTERS)), rng, size - 1
        )
        ranked = [NOISE_WORD, *coded]

        def build(count: int) -> Sample:
            appear = [
                word
                for rank, word in enumerate(ranked, 1)
                for _ in range(int(count * rank**-self.alpha / zeta(self.alpha)))
            ]
            restart(rng).shuffle(appear)
            return Sample(
                id=str(index),
                context=FREQUENT_CONTEXT + " ".join(appear),
                questions=(FREQUENT_QUESTION,),
                answers=(tuple(coded[:3]),),
                answer_prefix=FREQUENT_PREFIX,
                max_new_tokens=new_tokens,
                extra={"length": length, "words": len(appear)},
            )

        return fill(build, tokenizer, length, least=LEAST_FREQUENT, unit=3)

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return string_match_all(prediction, right)


def zeta(alpha: float) -> float:
    """Riemann's zeta function for `alpha` > 1, by Euler and Maclaurin after 200 terms."""
    terms = 200
    rest = terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2
    rest += alpha * terms ** (-alpha - 1) / 12
    return math.fsum(rank**-alpha for rank in range(1, terms)) + rest
