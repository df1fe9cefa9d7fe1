"""What a task is: samples to compress and ask about, and a score for the answers.

A `Sample` is text. `context` is what a method compresses, `questions` are asked one after the
other on the same cache. `context + questions[0] + answer_prefix` is, character by character, the
prompt that the benchmark's authors publish: white space between the parts belongs to the question.
`kv_bench.tasks.prompt.encode` makes token ids of it, and `length` counts those.

`ScoredText` is the other kind: a text whose likelihood is measured (`PerplexityTask`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """One context with its questions.

    Attributes:
        id: unique within a task and its settings; the same in every run.
        context: what is compressed.
        questions: asked one after the other on one cache, each after the answer before it; usually
            one. The first follows the context directly.
        answers: per question the accepted answers, or, where the metric wants them all (RULER),
            the parts of the answer.
        answer_prefix: what the model's answer starts with, given after each question; "" for none.
        max_new_tokens: tokens to generate per question.
        stop: texts which end the answer where they first occur (few-shot prompts); `score` cuts
            there too.
        chat: whether the prompt is put into the model's chat template. Some benchmarks do not for
            few-shot prompts.
        extra: what else is known of the sample: classes, depth, length, language, ...
    """

    id: str
    context: str
    questions: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]
    answer_prefix: str = ""
    max_new_tokens: int = 32
    stop: tuple[str, ...] = ()
    chat: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.questions or len(self.questions) != len(self.answers):
            raise ValueError(
                f"sample {self.id} has {len(self.questions)} questions and {len(self.answers)} "
                "answers; wanted are at least one question and as many answers"
            )


@dataclass(frozen=True)
class ScoredText:
    """A text in two parts: the context passes the model at once, the continuation is scored.

    context_ids, continuation_ids: token ids; neither is empty.
    """

    id: str
    context_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


class Samples(Sequence[Sample]):
    """Samples made when they are asked for; `ids` are known without making any.

    Raises:
        ValueError: an id occurs twice.
    """

    def __init__(self, ids: Sequence[str], make: Callable[[int], Sample]) -> None:
        self.ids = tuple(ids)
        self._make = make
        if len(set(self.ids)) < len(self.ids):
            twice = next(id for id in self.ids if self.ids.count(id) > 1)
            raise ValueError(f"ids must be unique, but {twice!r} occurs more than once")

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            picked = range(len(self))[index]
            return Samples([self.ids[at] for at in picked], lambda at: self._make(picked[at]))
        return self._make(range(len(self))[index])


class Task(ABC):
    """A benchmark's samples and its metric.

    name: as in `TASKS`. metric: name of the metric, e.g. "accuracy" or "f1"; `score` is in [0, 1]
    and higher is better.
    """

    name: str
    metric: str

    @abstractmethod
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
        """The samples, the same for the same arguments.

        Args:
            tokenizer: of the model, with its chat template if it has one.
            length: tokens of prompt and answer together, chat template included. Generated tasks
                fill it up to a few tokens, others cut longer prompts down to it; None: a generated
                task's default, or no cut.
            count: how many; None: a generated task's default, or all there are.
            seed: draws what is drawn.
            data: where a data set is: a file or folder in its schema, or a hub id; None: its
                published hub id. Tasks without a data set take none.
            text: prose for haystacks; None: held-out topics of the language reference.

        Raises:
            ValueError: an argument the task cannot take, or a length too small for the sample.
            MissingData: the data are not there; the text says where to get them and their schema.
        """

    def score(self, predictions: Sequence[str], sample: Sample) -> float:
        """Mean score of the sample's answers, in [0, 1].

        Args:
            predictions: one text per question, without the answer's prefix.

        Raises:
            ValueError: another number of texts.
        """
        if isinstance(predictions, str) or len(predictions) != len(sample.questions):
            raise ValueError(
                f"predictions must be one text per question of sample {sample.id}: "
                f"{len(sample.questions)} wanted, got {predictions!r:.60}"
            )
        scores = [
            self.score_answer(cut(prediction, sample.stop), right, sample)
            for prediction, right in zip(predictions, sample.answers, strict=True)
        ]
        return sum(scores) / len(scores)

    @abstractmethod
    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        """Score of one answer, in [0, 1]."""


class PerplexityTask(ABC):
    """Texts whose likelihood under the model is measured; the metric is perplexity, lower is
    better. `kv_bench.tasks.perplexity.negative_log_likelihood` measures one."""

    name: str
    metric: str = "perplexity"

    @abstractmethod
    def texts(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int | None = None,
        count: int | None = None,
        seed: int = 0,
        data: str | Path | None = None,
        text: str | None = None,
    ) -> Sequence[ScoredText]:
        """The texts, each of `length` tokens, context and continuation together; arguments and
        errors as in `Task.samples`."""


class MissingData(ValueError):
    """A data set that is not there; the text says where to get it and what its schema is."""


def check_counts(length: int | None, count: int | None) -> None:
    """Raise unless `length` and `count` are None or at least 1."""
    for name, value in (("length", length), ("count", count)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def cut(prediction: str, stop: Sequence[str]) -> str:
    """`prediction` up to where the first of the texts `stop` occurs after its leading line breaks;
    the same text if none does, so generation may go on."""
    lead = len(prediction) - len(prediction.lstrip("\n"))
    found = [at for end in stop if (at := prediction.find(end, lead)) >= 0]
    return prediction[: min(found)] if found else prediction
