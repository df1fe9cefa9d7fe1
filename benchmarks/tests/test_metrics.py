"""Scores against examples worked by hand, and against slow definitions."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_bench.metrics import infinitebench, longbench
from kv_bench.metrics.f1 import (
    normalize,
    normalize_chinese,
    qa_f1,
    qa_f1_chinese,
    qa_f1_chinese_characters,
)
from kv_bench.metrics.gsm8k import exact_match, final_number
from kv_bench.metrics.rouge import rouge_l, rouge_l_chinese, rouge_l_sum
from kv_bench.metrics.ruler import string_match_all, string_match_part

TEXTS = st.text(alphabet="ab c.\n", max_size=12)


@pytest.mark.parametrize(
    ("prediction", "references", "every", "some"),
    [
        ("The numbers are 12 and 34.", ["12", "34"], 1, 1),
        ("The numbers are 12 and 43.", ["12", "34"], 0.5, 1),
        ("", ["12", "34"], 0, 0),
        ("PARIS", ["paris"], 1, 1),
        ("paris", ["PARIS"], 1, 1),
        ("ÉCOLE", ["école"], 1, 1),
        ("in\x00 two\tparts", ["two\nparts"], 1, 1),  # control characters become line breaks
        ("1234", ["23"], 1, 1),  # no word boundaries
        ("abc", ["abc", "abc", "x"], 2 / 3, 1),
    ],
)
def test_ruler(prediction: str, references: list[str], every: float, some: float) -> None:
    assert string_match_all(prediction, references) == pytest.approx(every)
    assert string_match_part(prediction, references) == some


def test_ruler_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="references must hold at least one text"):
        string_match_all("a", [])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The  Cat, a dog; AN ox!", "cat dog ox"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("É–x", "é–x"),  # only ASCII punctuation goes
        ("", ""),
        ("the", ""),
    ],
)
def test_normalize(text: str, wanted: str) -> None:
    assert normalize(text) == wanted


def test_normalize_chinese() -> None:
    assert normalize_chinese("北京，是 Beijing。") == "北京是beijing"


@pytest.mark.parametrize(
    ("prediction", "reference", "wanted"),
    [
        ("Paris", "paris", 1),
        ("The city of Paris", "Paris", 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # "city of paris"
        ("a b b", "b b c", 2 * 2 / (2 + 3)),  # "a" is an article: b b against b b c
        ("", "Paris", 0),
        ("Paris", "", 0),
        ("", "", 0),
        ("London", "Paris", 0),
        ("42", "42.", 1),
    ],
)
def test_qa_f1(prediction: str, reference: str, wanted: float) -> None:
    assert qa_f1(prediction, reference) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("prediction", "reference", "words", "characters"),
    [
        ("北京", "北京", 1, 1),
        ("北京。", "北京", 1, 1),
        ("上海", "北京", 0, 0),
        ("", "北京", 0, 0),
        ("我爱北京", "北京", 2 * 1 / (3 + 1), 2 * 2 / (4 + 2)),  # 我 爱 北京
    ],
)
def test_chinese_f1(prediction: str, reference: str, words: float, characters: float) -> None:
    assert qa_f1_chinese(prediction, reference) == pytest.approx(words)
    assert qa_f1_chinese_characters(prediction, reference) == pytest.approx(characters)


@pytest.mark.parametrize(
    ("prediction", "reference", "wanted"),
    [
        ("the cat sat", "the cat sat", 1),
        ("the cat", "the cat sat", 2 * 1 * (2 / 3) / (1 + 2 / 3)),
        ("sat cat the", "the cat sat", 1 / 3),  # a common subsequence of one word
        ("the the the", "the", 1),  # words count once
        ("The cat", "the cat", 1 / 2),  # case counts
        ("a b. c d", "a b. c d", 1),
        ("c d. a b", "a b. c d", 1),  # each reference sentence finds its own
        ("", "a", 0),
        ("...", "a", 0),
        ("a", "", 0),
    ],
)
def test_rouge_l(prediction: str, reference: str, wanted: float) -> None:
    assert rouge_l(prediction, reference) == pytest.approx(wanted, abs=1e-6)


def test_rouge_l_of_a_text_without_full_stops() -> None:
    text = " ".join(f"w{at}" for at in range(sys.getrecursionlimit()))
    before = sys.getrecursionlimit()
    assert rouge_l(text[:-5], text) == pytest.approx(1, abs=2e-3)
    assert sys.getrecursionlimit() == before


@given(TEXTS, TEXTS)
def test_rouge_l_is_a_share(prediction: str, reference: str) -> None:
    assert 0 <= rouge_l(prediction, reference) <= 1


@pytest.mark.parametrize(
    ("prediction", "reference", "wanted"),
    [("北京 很 大", "北京很大", None), ("", "北京", 0.0), ("上海", "北京", 0.0)],
)
def test_rouge_l_chinese(prediction: str, reference: str, wanted: float | None) -> None:
    found = rouge_l_chinese(prediction, reference)
    assert found == pytest.approx(wanted) if wanted is not None else 0 < found <= 1


@pytest.mark.parametrize(
    ("prediction", "reference", "wanted"),
    [
        ("the cat sat", "the cat sat", 1),
        ("The cat!", "the cat", 1),  # case and punctuation do not count
        ("c d\na b", "a b\nc d", 1),  # sentences end at line breaks
        ("the cat", "the cat sat", 0.8),
        ("the the the", "the", 0.5),  # words count as often as they occur
        ("", "a", 0),
    ],
)
def test_rouge_l_sum(prediction: str, reference: str, wanted: float) -> None:
    assert rouge_l_sum(prediction, reference) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("prediction", "reference", "classes", "wanted"),
    [
        ("Type: Food", "Food", ["Food", "Date"], 1),
        ("Food or Date", "Food", ["Food", "Date"], 0.5),
        ("food", "Food", ["Food", "Date"], 0),  # case counts
        ("", "Food", ["Food", "Date"], 0),
        ("Other number", "Other number", ["number", "Other number"], 1),  # part of the right one
        ("Other number", "number", ["number", "Other number"], 0.5),
        # the published loop passes over "b" after it has left out "a"
        ("a b ab", "ab", ["a", "b", "ab"], 0.5),
        ("a b ab", "ab", ["a", "ab", "b"], 1),
        ("Food", "Food", [], 0),
    ],
)
def test_classification(prediction: str, reference: str, classes: list[str], wanted: float) -> None:
    assert longbench.classification(prediction, reference, classes) == wanted


@pytest.mark.parametrize(
    ("score", "prediction", "reference", "wanted"),
    [
        (longbench.count, "There are 7.", "7", 1),
        (longbench.count, "7 or 8", "7", 0.5),
        (longbench.count, "7 of 7, not 77", "7", 2 / 3),
        (longbench.count, "seven", "7", 0),
        (longbench.count, "", "7", 0),
        (longbench.retrieval, "Paragraph 3", "Paragraph 3", 1),
        (longbench.retrieval, "3", "Paragraph 3", 1),
        (longbench.retrieval, "Paragraph 3 or 4", "Paragraph 3", 0.5),
        (longbench.retrieval, "", "Paragraph 3", 0),
        (longbench.retrieval_chinese, "段落3", "段落3", 1),
        (longbench.retrieval_chinese, "段落4", "段落3", 0),
        (longbench.edit_similarity, "x = 1", "x = 1", 1),
        (longbench.edit_similarity, "\n\n# comment\nx = 1\ny", "x = 1", 1),
        (longbench.edit_similarity, "```python\nx = 1", "x = 1", 1),
        (longbench.edit_similarity, "x = 1", "x = 2", 0.8),  # 1 out, 1 in, of 10
        (longbench.edit_similarity, "// all", "x", 0),
        (longbench.edit_similarity, "", "x", 0),
        (longbench.edit_similarity, "", "", 1),
        (longbench.edit_similarity, "abc", "ab", 0.8),
        (longbench.edit_similarity, "abcd", "abx", 0.57),  # 4/7, in whole per cent
    ],
)
def test_longbench(score, prediction: str, reference: str, wanted: float) -> None:  # type: ignore[no-untyped-def]
    assert score(prediction, reference) == pytest.approx(wanted)


def test_retrieval_needs_a_number() -> None:
    with pytest.raises(ValueError, match=r"must name 'Paragraph ' and a number, got 'third'"):
        longbench.retrieval("3", "third")


@given(st.text("abc ", max_size=10), st.text("abc ", max_size=10))
def test_edit_similarity_is_that_of_a_common_subsequence(left: str, right: str) -> None:
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
            )
    total = len(left) + len(right)
    wanted = 2 * table[-1][-1] / total if total else 1
    assert longbench.edit_similarity(left, right) == pytest.approx(wanted, abs=0.005 + 1e-9)


@pytest.mark.parametrize(
    ("task", "prediction", "right", "wanted"),
    [
        ("passkey", " 71432.", ["71432"], 1),
        ("passkey", "The key 1 is 71432", ["71432"], 0),
        ("passkey", "", ["71432"], 0),
        ("number_string", "2200012222 is it", ["2200012222"], 1),
        ("kv_retrieval", '"00a0-b".', ["00a0-b"], 1),
        ("kv_retrieval", "00a0-bc", ["00a0-b"], 0),
        ("kv_retrieval", "", ["00a0-b"], 0),
        ("longdialogue_qa_eng", "it is Ace Rothstein", ["ACE", "ACE ROTHSTEIN"], 1),
        ("longdialogue_qa_eng", "Sam", ["ACE"], 0),
        ("math_find", "-3.5 of 7", ["3.5"], 1),  # signs do not count
        ("math_find", "4", ["4"], 1),
        ("math_find", "none", ["4"], 0),
        ("math_calc", "[1, 4, 8]", ["1", "4", "8"], 1),
        ("math_calc", "1 4 9 8", ["1", "4", "8"], 2 / 3),
        ("math_calc", "1", ["1", "4"], 0.5),
        ("math_calc", "", ["1", "4"], 0),
        ("code_run", "The value is -5", ["-5"], 1),
        ("code_run", "it is `12`.", ["12"], 1),
        ("code_run", "12 it is", ["12"], 0),
        ("code_run", "", ["12"], 0),
        ("code_debug", "B", ["parse", "B"], 1),
        ("code_debug", "A or B", ["parse", "B"], 1),  # the last letter
        ("code_debug", "B or A", ["parse", "B"], 1),  # starts with the right letter
        ("code_debug", "C", ["parse", "B"], 0),
        ("code_debug", "I think the answer is: parse", ["parse", "B"], 1),
        ("code_debug", "the answer is:", ["parse", "B"], 0),
        ("code_debug", "", ["parse", "B"], 0),
        ("longbook_choice_eng", "A. Walking", ["Walking", "A"], 1),
        ("longbook_choice_eng", "Walking", ["Walking", "A"], 1),
        ("longbook_choice_eng", "the answer is: Walking", ["Walking", "A"], 1),
        ("longbook_choice_eng", "answer is", ["Walking", "A"], 0),
        ("longbook_choice_eng", "B", ["Walking", "A"], 0),
        ("longbook_choice_eng", " ", ["Walking", "A"], 0),
        ("longbook_qa_eng", "the Peyton", ["Seb", "Peyton"], 1),
        ("longbook_qa_chn", "北京", ["上海", "北京。"], 1),
        ("longbook_sum_eng", "the cat", ["the cat"], 1),
    ],
)
def test_infinitebench(task: str, prediction: str, right: list[str], wanted: float) -> None:
    assert infinitebench.SCORES[task](prediction, right) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 = 13\n#### 18", "18"),
        ("#### 1,234.", "1234"),
        ("#### -5", "-5"),
        ("#### $70", "70"),
        ("#### 18 and then 19", "18"),
        ("so she makes $18.", "18"),
        ("first 3, then 1,000", "1000"),
        ("0.5", "0.5"),
        ("no number", None),
        ("", None),
        (".", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_exact_match() -> None:
    assert exact_match("#### 1,000", "5*200=1000\n#### 1000") == 1
    assert exact_match("#### 100", "#### 1000") == 0
    assert exact_match("", "#### 1000") == 0


@given(st.text(max_size=30), st.text(min_size=1, max_size=10))
def test_all_scores_are_shares(prediction: str, reference: str) -> None:
    scores = [
        string_match_all(prediction, [reference]),
        longbench.classification(prediction, reference, [reference, "x"]),
        longbench.count(prediction, reference),
        longbench.edit_similarity(prediction, reference),
        qa_f1(prediction, reference),
        qa_f1_chinese(prediction, reference),
        rouge_l(prediction, reference),
        rouge_l_sum(prediction, reference),
        exact_match(prediction, reference),
    ]
    assert all(0 <= score <= 1 for score in scores)
    for name in ("passkey", "kv_retrieval", "longdialogue_qa_eng", "longbook_qa_eng", "code_run"):
        right = ["7"] if name == "code_run" else [reference]
        assert 0 <= infinitebench.SCORES[name](prediction, right) <= 1
    for name in ("code_debug", "longbook_choice_eng"):
        assert infinitebench.SCORES[name](prediction, [reference, "A"]) in (0, 1)
