from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kv_segment as ks

SETS = [ks.DELIMITERS_SENTENCE, ks.DELIMITERS_CLAUSE, ks.DELIMITERS_SEMANTICACHE]
sets = st.sampled_from(SETS)
letters = st.text(alphabet="abcXYZ很的كيفहैéß", min_size=1, max_size=6)
anything = st.text(alphabet="ab1 .,:;?!)\"'\n\t。…(-", max_size=8)

IN_ALL = [
    ".",
    " .",
    ". ",
    ".\n\n",
    "?!",
    "...",
    "?",
    "!",
    ".)",
    '."',
    '?"',
    "\n",
    "\n    ",
    ").",
    "%.",
]
ONLY_WIDE = ["。", "！", "？", "｡", "؟", "۔", "।", "॥", "…", "。\n", "。」", "है।", "了。", "?…"]
CLAUSE_MARKS = [",", ";", ":", "，", "；", "：", "、", "،", "؛", "):", '",', " ,", "::"]
NEVER = [
    "3.14",
    "e.g.",
    "U.S.",
    ":)",
    ";)",
    " :)",
    ":-)",
    "Mr.",
    "J.",
    "3.",
    "v2.",
    ".com",
    "a",
    "the",
]
NEVER += ["\n)", "://", "()", '"', ")", "-", "", "a.b", "p.m.", "Ph.D.", "т.е."]
WORDS = ["end.", " end.", "wait...", "don't.", "конец.", "end!", "what?"]


@pytest.mark.parametrize("text", IN_ALL + WORDS)
def test_delimiters_of_every_set(text: str) -> None:
    assert [ks.is_delimiter(text, s) for s in SETS] == [True] * 3


@pytest.mark.parametrize("text", ONLY_WIDE)
def test_sentence_ends_of_other_scripts(text: str) -> None:
    assert [ks.is_delimiter(text, s) for s in SETS[:2]] == [True] * 2


@pytest.mark.parametrize("text", CLAUSE_MARKS)
def test_clause_marks(text: str) -> None:
    assert [ks.is_delimiter(text, s) for s in SETS[:2]] == [False, True]


@pytest.mark.parametrize("text", NEVER)
def test_look_alikes(text: str) -> None:
    assert [ks.is_delimiter(text, s) for s in SETS] == [False] * 3


def test_white_space_counts_where_it_is_a_delimiter() -> None:
    assert not ks.is_delimiter("  ", ks.DELIMITERS_SENTENCE)
    assert ks.is_delimiter("  ", ks.DELIMITERS_SEMANTICACHE)
    assert ks.is_delimiter("\t", ks.DELIMITERS_SEMANTICACHE)
    assert not ks.is_delimiter(" the", ks.DELIMITERS_SEMANTICACHE)
    assert not ks.is_delimiter("\n  x", ks.DELIMITERS_SENTENCE)


def written_out(text: str, marks: tuple[str, ...]) -> bool:
    """The rule for marks of one character, as one expression and its exceptions."""
    either = "|".join(map(re.escape, marks))
    found = re.fullmatch(rf"(?s)(.*)({either})((?:\s|[\"'”’»」』)\]}}）］｝】》〉])*)", text)
    if found is None:
        return False
    stem, mark, rest = found[1], found[2], re.sub(r"\s", "", found[3])
    if rest and (mark.isspace() or (mark in ":;" and re.search(r"[)\]}）］｝】》〉]", rest))):
        return False
    if mark != "." or stem == "" or stem[-1] in marks:
        return True
    if stem[-1].isdigit():
        return False
    if stem[-1].upper() == stem[-1].lower():
        return True
    return "." not in stem and len([c for c in stem if c.isalpha()]) >= 3


@given(
    st.one_of(anything, st.text(max_size=6)), st.text(alphabet=".?!:;。\n )”'", max_size=3), sets
)
def test_equals_the_rule_written_out(start: str, end: str, marks: tuple[str, ...]) -> None:
    assert ks.is_delimiter(start + end, marks) == written_out(start + end, marks)


@given(sets, st.data())
def test_runs_of_delimiters_are_delimiters(marks: tuple[str, ...], data: st.DataObject) -> None:
    run = data.draw(st.lists(st.sampled_from(marks), min_size=1, max_size=5))
    assert ks.is_delimiter("".join(run), marks)


@given(sets, st.data())
def test_without_any_delimiter_there_is_none(marks: tuple[str, ...], data: st.DataObject) -> None:
    text = data.draw(st.text(max_size=8).filter(lambda s: not any(m in s for m in marks)))
    assert not ks.is_delimiter(text, marks)


@given(anything, letters, sets)
def test_what_ends_in_a_letter_is_none(start: str, end: str, marks: tuple[str, ...]) -> None:
    # "है" ends in a vowel sign, which is no letter and no delimiter either.
    assert not ks.is_delimiter(start + end, marks)


@given(anything)
def test_a_leading_space_changes_nothing_for_sentences_and_clauses(text: str) -> None:
    for marks in SETS[:2]:
        assert ks.is_delimiter(" " + text, marks) == ks.is_delimiter(text, marks)
        assert ks.is_delimiter(text + " ", marks) == ks.is_delimiter(text, marks)


@given(anything, sets)
def test_adding_delimiters_to_the_set_order_and_repeats_do_not_show(
    text: str, marks: tuple[str, ...]
) -> None:
    again = (*reversed(marks), *marks)
    assert ks.is_delimiter(text, again) == ks.is_delimiter(text, marks)


@given(anything)
def test_a_sentence_end_is_a_clause_end(text: str) -> None:
    if ks.is_delimiter(text, ks.DELIMITERS_SENTENCE):
        assert ks.is_delimiter(text, ks.DELIMITERS_CLAUSE)


def test_delimiters_of_several_characters() -> None:
    assert ks.is_delimiter(" END", ["END"])
    assert not ks.is_delimiter("EN", ["END"])
    assert not ks.is_delimiter("\n", ["\n\n"])
    assert ks.is_delimiter(".\n\n", ["\n\n"])


@pytest.mark.parametrize(
    ("marks", "error", "message"),
    [
        ([], ValueError, r"non-empty strings, got \(\)"),
        ([".", ""], ValueError, "non-empty strings"),
        (".?", TypeError, r"sequence of str such as DELIMITERS_SENTENCE, got '\.\?'"),
    ],
)
def test_refuses(marks: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ks.is_delimiter(".", marks)
