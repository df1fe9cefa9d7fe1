"""Which texts count as a delimiter: the one rule that every vocabulary is read by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

DELIMITERS_SENTENCE: tuple[str, ...] = (
    *(".", "?", "!", "…", "\n"),
    *("。", "？", "！", "｡", "؟", "۔", "।", "॥"),
)
"""Sentence ends (SentenceKV, section 4.1): Latin, newline; CJK, Arabic, Urdu, Devanagari."""

DELIMITERS_CLAUSE: tuple[str, ...] = (
    *DELIMITERS_SENTENCE,
    *(",", ";", ":", "，", "；", "：", "、", "،", "؛"),
)
"""Sentence ends and clause marks (SABlock, section III-A: commas and full stops)."""

DELIMITERS_SEMANTICACHE: tuple[str, ...] = (".", ",", "?", "!", ";", ":", " ", "\t", "\n")
"""SemantiCache's own list (section 3.1, implementation details)."""

_QUOTES = "\"'”’»」』"
_BRACKETS = ")]}）］｝】》〉"
_CLOSING = _QUOTES + _BRACKETS
_SHORTEST_WORD = 3


def is_delimiter(text: str, delimiters: Sequence[str]) -> bool:
    r"""Whether `text`, the text of one token, closes a segment.

    1. White space at both ends that is no delimiter itself is ignored (`" ."`, `"\n    "`), and
       so are quotes and brackets that close after a mark (`'."'`, `"?)"`). A bracket after `:`
       or `;` is a face: `":)"` is no delimiter.
    2. What remains must end with a delimiter: `".\n\n"`, `"?!"`, `"..."`, `"):"` and `"end!"`
       do; `"3.14"`, `".com"` and `" the"` do not.
    3. A single full stop right after a digit or a cased letter may be part of a number or an
       abbreviation. It counts after a word of at least three letters (`"end."`), and not after
       a digit (`"3."`), a shorter word (`"Mr."`, `"J."`) or a word with a full stop inside
       (`"e.g."`, `"U.S."`).

    Args:
        text: decoded text of the token, with its leading space.
        delimiters: the strings that count, for instance `DELIMITERS_SENTENCE`.

    Raises:
        TypeError: `text` is no str, or an entry of `delimiters` is none.
        ValueError: `delimiters` is empty or holds an empty string.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {text!r}")
    return compiled_rule(delimiters)(text)


def compiled_rule(delimiters: Sequence[str]) -> Callable[[str], bool]:
    """`is_delimiter` for one set of delimiters, ready for many texts."""
    marks = tuple(sorted(_check_delimiters(delimiters), key=len, reverse=True))
    last_characters = {m[-1] for m in marks}

    def rule(text: str) -> bool:
        if last_characters.isdisjoint(text):
            return False
        head = text
        while not head.endswith(marks):
            if not head or not (head[-1].isspace() or head[-1] in _CLOSING):
                return False
            head = head[:-1]
        closing = text[len(head) :].strip()
        if closing and (head[-1].isspace() or _is_face(head[-1], closing)):
            return False
        mark = next(m for m in marks if head.endswith(m))
        return mark != "." or _full_stop_ends(head[:-1], marks)

    return rule


def _is_face(mark: str, closing: str) -> bool:
    return mark in ":;" and not set(_BRACKETS).isdisjoint(closing)


def _full_stop_ends(stem: str, marks: tuple[str, ...]) -> bool:
    """Rule 3: whether one full stop after `stem` ends a sentence."""
    if not stem or stem.endswith(marks):
        return True
    last = stem[-1]
    if last.isdigit():
        return False
    if last.lower() == last.upper():  # a sign, a space, or a script without case
        return True
    return "." not in stem and sum(c.isalpha() for c in stem) >= _SHORTEST_WORD


def _check_delimiters(delimiters: Sequence[str]) -> tuple[str, ...]:
    if isinstance(delimiters, str):
        raise TypeError(
            f"delimiters must be a sequence of str such as DELIMITERS_SENTENCE, got {delimiters!r}"
        )
    marks = tuple(delimiters)
    for mark in marks:
        if not isinstance(mark, str):
            raise TypeError(f"delimiters must hold str, got {mark!r}")
    if not marks or "" in marks:
        raise ValueError(f"delimiters must hold non-empty strings, got {marks!r}")
    return marks
