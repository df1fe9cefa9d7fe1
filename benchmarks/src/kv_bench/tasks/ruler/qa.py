"""RULER's question answering (`qa.py`): a data set's paragraphs hidden among its others.

qa_1 takes SQuAD 2.0 (Rajpurkar et al. 2018), qa_2 HotpotQA (Yang et al. 2018), from their own
files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_bench.metrics.ruler import string_match_part
from kv_bench.tasks.base import MissingData, Sample, Samples, Task, check_counts
from kv_bench.tasks.fit import fill
from kv_bench.tasks.generated import restart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)
OPENING = "The following are given documents.\n\n"
QUESTION = "Question: {query}"
ANSWER_PREFIX = " Answer:"
DEFAULT_COUNT, DEFAULT_LENGTH = 500, 4096


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and documents by number: those that answer it, and others
    of the same article."""

    query: str
    answers: tuple[str, ...]
    context: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    questions: list[Question]
    documents: list[str]


@dataclass(frozen=True)
class RulerQA(Task):
    """The question's documents among as many others as the length takes."""

    name: str
    read: Callable[[Any], Corpus]
    source: str
    schema: str
    metric: str = "string_match_part"

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
        if text is not None:
            raise ValueError(f"{self.name} hides documents among documents and takes no text")
        corpus = self.load(data)
        wanted = min(count or DEFAULT_COUNT, len(corpus.questions))
        tokens = length or DEFAULT_LENGTH

        def make(index: int) -> Sample:
            rng = random.Random(f"{self.name}:{tokens}:{seed}:{index}")
            return self.generate(tokenizer, corpus, index, tokens, rng)

        return Samples([str(index) for index in range(wanted)], make)

    def load(self, data: str | Path | None) -> Corpus:
        """The data set's file.

        Raises:
            MissingData: there is none, or it has another schema.
        """
        if data is None or not Path(data).is_file():
            found = "no file is named" if data is None else f"there is no file {data}"
            raise MissingData(f"{self.name}: {found}; get {self.source}. Schema: {self.schema}")
        return _read(self, Path(data).resolve(), Path(data).stat().st_mtime_ns)

    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        corpus: Corpus,
        index: int,
        length: int,
        rng: random.Random,
    ) -> Sample:
        question = corpus.questions[index]
        order = among(question, len(corpus.documents), rng)

        def build(count: int) -> Sample:
            taken = [order[at % len(order)] for at in range(count)]
            restart(rng).shuffle(taken)
            documents = "\n\n".join(
                f"Document {at}:\n{corpus.documents[number]}" for at, number in enumerate(taken, 1)
            )
            return Sample(
                id=str(index),
                context=f"{INSTRUCTION}{OPENING}{documents}\n\n{INSTRUCTION}",
                questions=(QUESTION.format(query=question.query),),
                answers=(question.answers,),
                answer_prefix=ANSWER_PREFIX,
                max_new_tokens=32,
                extra={"length": length, "documents": count},
            )

        return fill(build, tokenizer, length, least=len(question.context), unit=180)

    def score_answer(self, prediction: str, right: Sequence[str], sample: Sample) -> float:
        return string_match_part(prediction, right)


def among(question: Question, documents: int, rng: random.Random) -> list[int]:
    """All documents: the question's own, then those of its article, then the others, as drawn."""
    related, own = list(question.related), {*question.context, *question.related}
    others = [number for number in range(documents) if number not in own]
    rng.shuffle(related)
    rng.shuffle(others)
    return [*question.context, *related, *others]


@lru_cache(maxsize=2)
def _read(task: RulerQA, file: Path, changed: int) -> Corpus:
    try:
        corpus = task.read(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise MissingData(
            f"{task.name}: {file} has another schema ({type(error).__name__}: {error}). "
            f"Wanted: {task.schema}; get {task.source}"
        ) from error
    if not corpus.questions:
        raise MissingData(f"{task.name}: {file} has no question that has an answer")
    return corpus


def read_squad(content: Any) -> Corpus:
    """Questions of SQuAD 2.0 that have an answer."""
    articles = [[part["context"] for part in one["paragraphs"]] for one in content["data"]]
    documents = sorted({text for article in articles for text in article})
    number = {text: at for at, text in enumerate(documents)}
    questions = []
    for article, one in zip(articles, content["data"], strict=True):
        for paragraph in one["paragraphs"]:
            own = number[paragraph["context"]]
            related = tuple(dict.fromkeys(number[text] for text in article if number[text] != own))
            questions += [
                Question(
                    query=asked["question"],
                    answers=tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
                    context=(own,),
                    related=related,
                )
                for asked in paragraph["qas"]
                if not asked["is_impossible"]
            ]
    return Corpus(questions, documents)


def read_hotpotqa(content: Any) -> Corpus:
    """Questions of HotpotQA, each with its ten paragraphs."""
    paragraphs = [
        [f"{title}\n{''.join(sentences)}" for title, sentences in one["context"]] for one in content
    ]
    documents = sorted({text for own in paragraphs for text in own})
    number = {text: at for at, text in enumerate(documents)}
    questions = [
        Question(
            query=one["question"],
            answers=(one["answer"],),
            context=tuple(dict.fromkeys(number[text] for text in own)),
        )
        for one, own in zip(content, paragraphs, strict=True)
    ]
    return Corpus(questions, documents)


QA_TASKS = (
    RulerQA(
        name="ruler_qa_1",
        read=read_squad,
        source="SQuAD 2.0's dev-v2.0.json from https://rajpurkar.github.io/SQuAD-explorer/",
        schema='{"data": [{"paragraphs": [{"context": text, "qas": [{"question": text, '
        '"is_impossible": bool, "answers": [{"text": text}]}]}]}]}',
    ),
    RulerQA(
        name="ruler_qa_2",
        read=read_hotpotqa,
        source="HotpotQA's hotpot_dev_distractor_v1.json from https://hotpotqa.github.io/",
        schema='[{"question": text, "answer": text, "context": [[title, [sentence, ...]], ...]}]',
    ),
)
