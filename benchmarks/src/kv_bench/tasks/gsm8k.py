"""GSM8K with many worked examples in the prompt: "Training Verifiers to Solve Math Word Problems"
(Cobbe et al. 2021), github.com/openai/grade-school-math, MIT.

The prompt is that of the LM Evaluation Harness (`lm_eval/tasks/gsm8k/gsm8k.yaml`, MIT); 50 examples
as in SeKV's table 2. All samples of a seed have the same examples, which are the context. Neither
the prompt nor the answers are in a chat template, as there by default.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kv_bench.metrics.gsm8k import exact_match
from kv_bench.tasks.base import MissingData, Sample, Samples, Task, check_counts
from kv_bench.tasks.data import Source, read_rows
from kv_bench.tasks.prompt import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB = "openai/gsm8k"
QUESTION = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class Gsm8k(Task):
    """Problems of the test part after `shots` solved ones drawn from the training part."""

    name: str = "gsm8k"
    shots: int = 50
    max_new_tokens: int = 256
    metric: str = "exact_match"

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
        """The test part's first `count` problems; the seed draws the examples.

        `data` is a folder with train.jsonl and test.jsonl, or a hub id. A prompt that is longer
        than `length` is an error, since fewer examples would be another benchmark.
        """
        check_counts(length, count)
        if text is not None:
            raise ValueError(f"{self.name} has problems of its own and takes no text")
        train = read_rows(data, source("train"), task=self.name)
        test = read_rows(data, source("test"), task=self.name)[:count]
        if len(train) < self.shots:
            raise MissingData(
                f"{self.name} takes {self.shots} examples, but the training part has {len(train)}"
            )
        examples = random.Random(f"{self.name}:{seed}").sample(list(train), self.shots)
        solved = [f"{QUESTION.format(**one)} {one['answer']}\n\n" for one in examples]

        def make(index: int) -> Sample:
            sample = Sample(
                id=str(index),
                context="".join(solved),
                questions=(QUESTION.format(**test[index]),),
                answers=((test[index]["answer"],),),
                max_new_tokens=self.max_new_tokens,
                stop=("Question:",),
                chat=False,
                extra={"shots": self.shots},
            )
            tokens = encode(tokenizer, sample).tokens(sample.max_new_tokens)
            if length is not None and tokens > length:
                raise ValueError(
                    f"length is {length} tokens, but {self.shots} examples, problem {index} and "
                    f"its answer take {tokens}"
                )
            return sample

        return Samples([str(index) for index in range(len(test))], make)

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return max(exact_match(prediction, one) for one in right)


def source(part: str) -> Source:
    return Source(
        part=part,
        hub=HUB,
        published={"path": HUB, "name": "main", "split": part},
        mirror={"split": part},
        fields=("question", "answer"),
        page="https://github.com/openai/grade-school-math (grade_school_math/data)",
    )
