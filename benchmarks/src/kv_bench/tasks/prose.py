"""Prose as a haystack, and needles put between its sentences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice

from kv_integration import haystack


def prose(text: str | None) -> str:
    """`text`, or the held-out topics of the language reference.

    Raises:
        ValueError: `text` has no text.
    """
    if text is None:
        return _topics()
    if not text.strip():
        raise ValueError("text is empty: a haystack needs prose")
    return text.strip()


@cache
def _topics() -> str:
    return "\n\n".join(haystack.topics(held_out=True)).strip()


def first_words(words: Sequence[str], count: int) -> str:
    """`count` words with spaces between, over and over if there are fewer."""
    return " ".join(islice(cycle(words), count))


def sentence_starts(text: str) -> list[int]:
    """Character offsets at which a sentence starts, and the end of the text."""
    return [0, *haystack.sentence_ends(text), len(text)]


def insert(text: str, needles: Sequence[str], offsets: Sequence[int]) -> str:
    """`text` with each needle at its character offset; needles at one place keep their order."""
    pieces: list[str] = []
    begin = 0
    for at in sorted(range(len(needles)), key=lambda at: offsets[at]):
        pieces.append(text[begin : offsets[at]])
        begin = offsets[at]
        gap = "" if not pieces[-1] or pieces[-1][-1].isspace() else " "
        pieces.append(f"{gap}{needles[at]} ")
    return "".join([*pieces, text[begin:]]).strip()
