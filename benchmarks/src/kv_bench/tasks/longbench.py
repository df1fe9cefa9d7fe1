"""LongBench's 21 data sets: "LongBench: A Bilingual, Multitask Benchmark for Long Context
Understanding" (Bai et al. 2024), github.com/THUDM/LongBench, MIT.

Prompts, answer lengths and metrics are its own (`longbench.json`), and so are the truncation in the
middle, the sets that do without a chat template (few-shot learning and code) and those of whose
answers only the first line counts. The best of several references counts. The prompt's end, such as
"Answer:", is part of the user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar

from kv_bench.metrics.longbench import SCORES
from kv_bench.tasks.base import Sample
from kv_bench.tasks.data import Row, Source
from kv_bench.tasks.published import PublishedTask

HUB = "THUDM/LongBench"
FIELDS = ("input", "context", "answers", "length", "dataset", "language", "all_classes", "_id")
PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")


@dataclass(frozen=True)
class LongBench(PublishedTask):
    """The data set `dataset`; `context` and `question` are the two parts of its prompt."""

    dataset: str
    context: str
    question: str
    max_new_tokens: int
    metric: str

    row_id: ClassVar[str] = "_id"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"longbench_{self.dataset}"

    @property
    def source(self) -> Source:
        return Source(
            part=self.dataset,
            hub=HUB,
            published={
                "path": "json",
                "data_files": f"zip://data/{self.dataset}.jsonl::hf://datasets/{HUB}/data.zip",
                "split": "train",
            },
            mirror={"name": self.dataset, "split": "test"},
            fields=FIELDS,
            page=f"https://huggingface.co/datasets/{HUB} (data.zip)",
        )

    def sample(self, row: Row) -> Sample:
        """The whole prompt of a row."""
        return Sample(
            id=str(row["_id"]),
            context=self.context.format(context=row["context"]),
            questions=(self.question.format(input=row["input"]),),
            answers=(tuple(row["answers"]),),
            max_new_tokens=self.max_new_tokens,
            stop=("\n",) if self.dataset in FIRST_LINE else (),
            chat=self.dataset not in PLAIN,
            extra={
                "classes": tuple(row["all_classes"] or ()),
                "language": row["language"],
                "words": row["length"],
            },
        )

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        score = SCORES[self.metric]
        return max(score(prediction, one, sample.extra["classes"]) for one in right)


def _all() -> tuple[LongBench, ...]:
    table = json.loads(files("kv_bench.tasks").joinpath("longbench.json").read_text("utf-8"))
    return tuple(LongBench(dataset=name, **row) for name, row in table["sets"].items())


LONGBENCH_TASKS = _all()
