"""The largest haystack with which a sample keeps within a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_bench.tasks.base import Sample
from kv_bench.tasks.prompt import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SLACK = 2  # tokens below the length that are not worth another try
HALVE_EVERY = 6


def fill(
    build: Callable[[int], Sample],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    least: int,
    unit: float,
) -> Sample:
    """`build(n)` for an `n` with which prompt and answers take `length` tokens or one or two less,
    or one unit more would take too many.

    `build` must give the same sample whenever it is called with the same number, of about that many
    units; it is called about five times.

    Args:
        least: units that the sample needs.
        unit: a guess of the tokens per unit.

    Raises:
        ValueError: the sample with `least` units takes more than `length` tokens.
    """
    made: dict[int, Sample] = {}

    def size(units: int) -> int:
        made[units] = sample = build(units)
        return encode(tokenizer, sample).tokens(sample.max_new_tokens)

    found = largest(size, length, least=least, unit=unit)
    if found is None:
        raise ValueError(
            f"length is {length} tokens, but with the least haystack prompt and answer take "
            f"{encode(tokenizer, made[least]).tokens(made[least].max_new_tokens)}"
        )
    return made[found]


def largest(size: Callable[[int], int], limit: int, *, least: int, unit: float) -> int | None:
    """An n with `size(n)` at `limit` or up to `SLACK` below, or `size(n) <= limit < size(n + 1)`;
    None if `size(least)` is above.

    `size` is about a line of slope `unit` per step, so guesses are interpolated; one of
    `HALVE_EVERY` halves the interval, so that any shape comes to an end.
    """
    low, low_size = least, size(least)
    if low_size > limit:
        return None
    high, high_size, tries = None, 0, 0
    while limit - low_size > SLACK and high != low + 1:
        tries += 1
        if high is None:
            guess = low + max(int((limit - low_size) / unit), 1)
        else:
            share = 0.5 if tries % HALVE_EVERY == 0 else (limit - low_size) / (high_size - low_size)
            guess = min(max(low + int((high - low) * share), low + 1), high - 1)
        guess_size = size(guess)
        if guess_size > limit:
            high, high_size = guess, guess_size
        else:
            unit = max((guess_size - low_size) / (guess - low), 1e-3)
            low, low_size = guess, guess_size
    return low
