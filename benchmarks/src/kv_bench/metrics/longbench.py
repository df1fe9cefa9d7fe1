"""LongBench's scores of one answer against one reference (Bai et al. 2024; `metrics.py`, MIT).

Each takes prediction, reference and the sample's classes, which only `classification` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rapidfuzz import fuzz

from kv_bench.metrics.f1 import qa_f1, qa_f1_chinese
from kv_bench.metrics.rouge import rouge_l, rouge_l_chinese

COMMENT_MARKS = ("`", "#", "//")


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the answer names, if the right one is among them.

    Named classes that are part of the right one's name do not count. As in the published scorer,
    one which follows a class just left out is not looked at, so it counts.
    """
    named = [name for name in classes if name in prediction]
    at = 0
    while at < len(named):
        if named[at] in reference and named[at] != reference:
            del named[at]
        at += 1
    return 1 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """Share of the numbers in the answer that are the right one; 0 without any."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """`count` of the number of the right paragraph: "Paragraph 3"."""
    return count(prediction, _number_after("Paragraph ", reference))


def retrieval_chinese(prediction: str, reference: str) -> float:
    """`count` of the number of the right paragraph: "段落3"."""
    return count(prediction, _number_after("段落", reference))


def edit_similarity(prediction: str, reference: str) -> float:
    """Similarity of the answer's first line of code and the right one, in whole per cent.

    1 less insertions and deletions over the sum of the lengths. A line with a back quote, "#" or
    "//" is no line of code.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in COMMENT_MARKS))
    return round(fuzz.ratio(next(code, ""), reference)) / 100


def _number_after(word: str, reference: str) -> str:
    found = re.search(rf"{word}(\d+)", reference)
    if found is None:
        raise ValueError(f"the right answer must name {word!r} and a number, got {reference!r}")
    return found[1]


def _plain(score: Callable[[str, str], float]) -> Callable[[str, str, Sequence[str]], float]:
    return lambda prediction, reference, classes: score(prediction, reference)


SCORES: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "f1": _plain(qa_f1),
    "f1_zh": _plain(qa_f1_chinese),
    "rouge_l": _plain(rouge_l),
    "rouge_l_zh": _plain(rouge_l_chinese),
    "classification": classification,
    "retrieval": _plain(retrieval),
    "retrieval_zh": _plain(retrieval_chinese),
    "count": _plain(count),
    "edit_similarity": _plain(edit_similarity),
}
