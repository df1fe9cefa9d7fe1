"""ROUGE-L of two libraries, since two benchmarks define it by them.

LongBench takes `rouge` (sets of words; sentences end at "."), InfiniteBench `rouge-score`
(Porter's stems off, sentences end at line breaks). Their figures differ by points.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from kv_bench.metrics.f1 import chinese_words


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F as LongBench has it; 0 for an answer without any sentence.

    LongBench's own scorer also gives 0 where the library exceeds the interpreter's recursion limit,
    which long texts without "." do; here they get their score.
    """
    if not any(prediction.split(".")) or not any(reference.split(".")):
        return 0.0
    with _recursion(len(prediction.split()) + len(reference.split())):
        scores = _rouge().get_scores(prediction, reference, avg=True)
    return min(float(scores["rouge-l"]["f"]), 1.0)


def rouge_l_chinese(prediction: str, reference: str) -> float:
    """`rouge_l` over jieba's words."""
    return rouge_l(" ".join(chinese_words(prediction)), " ".join(chinese_words(reference)))


def rouge_l_sum(prediction: str, reference: str) -> float:
    """rougeLsum F as InfiniteBench has it."""
    return float(_rouge_score().score(reference, prediction)["rougeLsum"].fmeasure)


@cache
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


@cache
def _rouge_score() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeLsum"], use_stemmer=False)


@contextmanager
def _recursion(words: int) -> Iterator[None]:
    """Room for `rouge`, which walks back along two texts by one call per word."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, words + before))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
