"""InfiniteBench's twelve tasks: "∞Bench: Extending Long Context Evaluation Beyond 100K Tokens"
(Zhang et al. 2024), github.com/OpenBMB/InfiniteBench, MIT.

Prompts are those for open models (`infinitebench.json`), answer lengths, scores and the truncation
in the middle its own. The prompt's end, such as "The pass key is", starts the model's answer.
math_find names the number wanted as the input does ("the second largest number" too).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, ClassVar

from kv_bench.metrics.infinitebench import SCORES
from kv_bench.tasks.base import MissingData, Sample
from kv_bench.tasks.data import Row, Source
from kv_bench.tasks.published import PublishedTask

HUB = "xinrongzhang2022/InfiniteBench"
FIELDS = ("id", "context", "input", "answer", "options")
CHOICE = ("code_debug", "longbook_choice_eng")
LETTERS = "ABCD"


@dataclass(frozen=True)
class InfiniteBench(PublishedTask):
    """The task `dataset`; `context`, `question` and `answer_prefix` are its prompt's parts."""

    dataset: str
    context: str
    question: str
    answer_prefix: str
    max_new_tokens: int
    metric: str

    row_id: ClassVar[str] = "id"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"infinitebench_{self.dataset}"

    @property
    def source(self) -> Source:
        return Source(
            part=self.dataset,
            hub=HUB,
            published={
                "path": "json",
                "data_files": f"hf://datasets/{HUB}/{self.dataset}.jsonl",
                "split": "train",
            },
            mirror={"split": self.dataset},
            fields=FIELDS,
            page=f"https://huggingface.co/datasets/{HUB}",
        )

    def sample(self, row: Row) -> Sample:
        """The whole prompt of a row.

        Raises:
            MissingData: the row lacks what its task's prompt names.
        """
        values = {"context": row["context"], "input": row["input"], **self.named(row)}
        return Sample(
            id=str(row["id"]),
            context=self.context.format(**values),
            questions=(self.question.format(**values),),
            answers=(self.right(row),),
            answer_prefix=self.answer_prefix.format(**values),
            max_new_tokens=self.max_new_tokens,
            extra={"language": "zh" if self.dataset.endswith("_chn") else "en"},
        )

    def named(self, row: Row) -> dict[str, Any]:
        """What the prompt names besides context and input."""
        if self.dataset in CHOICE:
            if len(row["options"]) != len(LETTERS):
                raise self.wrong(row, f"four options, got {len(row['options'])}")
            return {f"option_{x.lower()}": o for x, o in zip(LETTERS, row["options"], strict=True)}
        if self.dataset == "math_find":
            wanted = self.find(r"The (.+? number) of", row)
            return {"prefix": f"What is the {wanted.lower()} in the following list?"}
        if self.dataset == "code_run":
            call = self.find(r"(func_[0-9]+\(-?[0-9]+\))", row)
            return {"func_call": call, "func": call.split("(")[0]}
        return {}

    def right(self, row: Row) -> tuple[str, ...]:
        """Right answers; of multiple choice the option's text and its letter."""
        given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        right = tuple(str(one) for one in given)
        if self.dataset not in CHOICE:
            return right
        if right[0] not in row["options"]:
            raise self.wrong(row, f"an answer that is one of the options, got {right[0]!r}")
        return right[0], LETTERS[list(row["options"]).index(right[0])]

    def find(self, pattern: str, row: Row) -> str:
        found = re.search(pattern, row["input"])
        if found is None:
            raise self.wrong(row, f"an input with {pattern!r}, got {row['input']!r:.80}")
        return found[1]

    def wrong(self, row: Row, wanted: str) -> MissingData:
        return MissingData(f"{self.name}: row {row['id']} should have {wanted}")

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return SCORES[self.dataset](prediction, right)


def _all() -> tuple[InfiniteBench, ...]:
    table = json.loads(files("kv_bench.tasks").joinpath("infinitebench.json").read_text("utf-8"))
    return tuple(InfiniteBench(dataset=name, **row) for name, row in table["sets"].items())


INFINITEBENCH_TASKS = _all()
