"""InfiniteBench's scores of one answer (Zhang et al. 2024; `src/compute_scores.py`, MIT).

Each takes the answer and the right ones: for multiple choice the option's text and its letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kv_bench.metrics.f1 import qa_f1, qa_f1_chinese_characters
from kv_bench.metrics.rouge import rouge_l_sum

NUMBER = re.compile(r"\d+\.\d+|\d+")


def first_number(prediction: str, right: Sequence[str]) -> float:
    """Whether the first run of ASCII digits is the right one: passkey, number_string."""
    found = re.search("[0-9]+", prediction)
    return float(found is not None and found[0] == right[0])


def named_value(prediction: str, right: Sequence[str]) -> float:
    """Whether the right value is a word of the answer: kv_retrieval."""
    return float(right[0] in _without("\n:\"'.,?!{}", prediction).split())


def speaker(prediction: str, right: Sequence[str]) -> float:
    """Whether the answer has one of the character's names: longdialogue_qa_eng."""
    return float(any(name.upper() in prediction.upper() for name in right))


def found_number(prediction: str, right: Sequence[str]) -> float:
    """Whether the first number, without its sign, equals the right one: math_find."""
    found = NUMBER.search(prediction)
    return float(found is not None and float(found[0]) == float(right[0]))


def calculated(prediction: str, right: Sequence[str]) -> float:
    """Share of the intermediate values that are right before the first wrong one: math_calc."""
    numbers = re.findall("[0-9]+", prediction)
    same = 0
    for number, wanted in zip(numbers, right, strict=False):
        if int(number) != int(wanted):
            break
        same += 1
    return same / len(right)


def returned(prediction: str, right: Sequence[str]) -> float:
    """Whether the last word is the right integer: code_run."""
    words = _without("\n.`'\":", prediction).split()
    try:
        return float(bool(words) and int(words[-1]) == int(right[0]))
    except ValueError:
        return 0.0


def chosen_function(prediction: str, right: Sequence[str]) -> float:
    """Whether the last letter that stands alone, or what follows the first known phrase, is the
    right option: code_debug."""
    name, letter = right
    text = prediction.strip()
    if _last_letter("A-J", text) == letter:
        return 1.0
    text = _single_spaces(re.sub(r"Option|option|[\n`'\"\-*]", " ", text))
    if text.startswith((letter, name)):
        return 1.0
    rest = _after_phrase(text, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(rest is not None and rest.startswith((letter, name)))


def chosen_option(prediction: str, right: Sequence[str]) -> float:
    """Whether the answer chooses the right option by letter or text: longbook_choice_eng."""
    text = prediction.strip()
    if _last_letter("A-D", text) in right:
        return 1.0
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in right)
    if text in right:
        return 1.0
    text = _single_spaces(_without("\n\"'.,?!{}", text))
    rest = _after_phrase(text, ("answer is:", "answer:", "answer is", "option is"))
    if rest is not None:
        return float(rest.startswith(tuple(right)))
    return float(next((word in right for word in text.split() if word in "ABCD"), False))


def best_f1(prediction: str, right: Sequence[str]) -> float:
    """The best F1 over words: longbook_qa_eng."""
    return max(qa_f1(prediction, one) for one in right)


def best_f1_chinese(prediction: str, right: Sequence[str]) -> float:
    """The best F1 over characters: longbook_qa_chn."""
    return max(qa_f1_chinese_characters(prediction, one) for one in right)


def summary(prediction: str, right: Sequence[str]) -> float:
    """rougeLsum: longbook_sum_eng."""
    return rouge_l_sum(prediction, right[0])


def _without(marks: str, text: str) -> str:
    return text.translate(str.maketrans(marks, " " * len(marks)))


def _single_spaces(text: str) -> str:
    return re.sub(" +", " ", text)


def _last_letter(letters: str, text: str) -> str | None:
    """The last of `letters` that stands alone before the first line's end that has one."""
    found = re.search(rf"\b[{letters}]\b(?!.*\b[{letters}]\b)", text)
    return None if found is None else found[0]


def _after_phrase(text: str, phrases: Sequence[str]) -> str | None:
    """What follows the first of `phrases` that occurs, and one character; None if none does."""
    for phrase in phrases:
        at = text.find(phrase)
        if at >= 0:
            return text[at + len(phrase) + 1 :]
    return None


SCORES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "passkey": first_number,
    "number_string": first_number,
    "kv_retrieval": named_value,
    "longdialogue_qa_eng": speaker,
    "math_find": found_number,
    "math_calc": calculated,
    "code_run": returned,
    "code_debug": chosen_function,
    "longbook_choice_eng": chosen_option,
    "longbook_qa_eng": best_f1,
    "longbook_qa_chn": best_f1_chinese,
    "longbook_sum_eng": summary,
}
