"""RULER's random words: those of `wonderwords`, as in its generators."""

from __future__ import annotations

import random
from functools import cache


@cache
def of_kind(kind: str) -> tuple[str, ...]:
    """All words of a kind, sorted: "noun", "adjective" or "verb"."""
    from wonderwords import RandomWord

    return tuple(sorted(set(RandomWord().filter(include_categories=[kind]))))


@cache
def single_words() -> tuple[str, ...]:
    """All nouns, adjectives and verbs, sorted."""
    return tuple(sorted({word for kind in ("noun", "adjective", "verb") for word in of_kind(kind)}))


def draw_pair(rng: random.Random) -> str:
    """An adjective and a noun with a hyphen between."""
    return f"{rng.choice(of_kind('adjective'))}-{rng.choice(of_kind('noun'))}"
