"""Tasks for tests of the runner: numbers in a line of words, asked once or twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_bench.tasks import Sample, Samples, Task


@dataclass(frozen=True)
class Numbers(Task):
    """`questions` questions per sample; an answer's score follows from its text."""

    name: str = "numbers"
    questions: int = 1
    made: list[int] = field(default_factory=list)
    metric: str = "accuracy"

    def samples(
        self, tokenizer, *, length=None, count=None, seed=0, data=None, text=None
    ) -> Samples:
        count = 3 if count is None else count

        def make(at: int) -> Sample:
            self.made.append(at)
            words = " ".join(f"number {seed + at + n} is {n * n}." for n in range(length or 40))
            return Sample(
                id=f"{self.name}-{at}",
                context=words[: 2 * (length or 40)],
                questions=tuple(f"\n\nWhat is number {at + n}?" for n in range(self.questions)),
                answers=(("1", "one"),) * self.questions,
                answer_prefix=" It is" if self.questions == 1 else "",
                max_new_tokens=5,
                extra={"depth": at / 10},
            )

        return Samples([f"{self.name}-{at}" for at in range(count)], make)

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return len(prediction) % 7 / 7
