"""Needle-in-a-haystack prompts from real English prose that every CPython ships.

The haystack is the language reference in `pydoc_data.topics`, split by topic into a training part
(the embedded model has read it) and a held-out part (it has not). A needle is one sentence that
states a six-digit number for a one-word key; the question asks for that number.

`document_prompt` and `needle_prompt` turn a document and a question into a model's prompt.
"""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEEDLE = "The magic number for {key} is {number}."
QUESTION = "What is the magic number for {key}?"
HELD_OUT_PAIRS = 0.1  # share of all key-number pairs that no training sequence holds
LONGEST_WORD = 20  # characters
SLACK = 2  # tokens that a cut prompt may stay below its length without another try
COMMON_WORDS = (
    *("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island"),
    *("jacket", "kitchen", "ladder", "market", "ocean", "paper", "queen", "river", "silver"),
    *("table", "umbrella", "valley", "window", "yellow"),
)
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+")


def is_held_out(name: str, share: float = 0.3) -> bool:
    """Whether `name` falls into the held-out part: decided by its hash, so it never changes."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < share


def topics(*, held_out: bool) -> list[str]:
    """Texts of the topics of one part, in the order of their names."""
    table = pydoc_data.topics.topics
    return [table[name] for name in sorted(table) if is_held_out(name) == held_out]


def sentence_ends(text: str) -> list[int]:
    """Character offsets just after the white space that follows a sentence's end."""
    return [match.end() for match in SENTENCE_END.finditer(text)]


@dataclass(frozen=True)
class Haystack:
    """A document with one needle, the question for it and the answer that is expected."""

    document: str
    question: str
    expected: str


def insert_needle(text: str, *, key: str, number: str, depth: float) -> Haystack:
    """Put the needle between two sentences of `text`, `depth` (0 start, 1 end) of the way through.

    Raises:
        ValueError: `depth` is outside [0, 1].
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be between 0 (start) and 1 (end), got {depth}")
    ends = [0, *sentence_ends(text), len(text)]
    at = min(ends, key=lambda end: abs(end - depth * len(text)))
    before, after = text[:at], text[at:]
    gap = "" if not before or before[-1].isspace() else " "
    needle = NEEDLE.format(key=key, number=number)
    return Haystack(
        document=f"{before}{gap}{needle} {after}",
        question=QUESTION.format(key=key),
        expected=number,
    )


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for a model: token ids, the answer if it is known, what it is in a line."""

    ids: list[int]
    expected: str | None
    caption: str


def encode_prompt(tokenizer: PreTrainedTokenizerBase, document: str, question: str) -> list[int]:
    """Token ids of document and question: the chat template's user turn if there is one."""
    text = document.strip()
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{text}\n\nQuestion: {question}\nAnswer:")["input_ids"])
    message = {"role": "user", "content": f"{text}\n\n{question}"}
    chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(chat, add_special_tokens=False)["input_ids"])


def document_prompt(
    tokenizer: PreTrainedTokenizerBase, document: str, question: str, *, name: str = "a document"
) -> Prompt:
    """Ask `question` about `document`; `name` is for the caption.

    Raises:
        ValueError: the document or the question is empty.
    """
    for what, text in ((name, document), ("the question", question)):
        if not text.strip():
            raise ValueError(f"{what} is empty")
    ids = encode_prompt(tokenizer, document, question)
    return Prompt(ids, None, f"{len(ids)} tokens: {name} and the question “{question}”")


def read_keys(folder: Path) -> tuple[str, ...]:
    """Words that a model's needles are about: its `keys.json` if it has one, else common words.

    Raises:
        ValueError: `keys.json` is no list of words.
    """
    file = folder / "keys.json"
    if not file.is_file():
        return COMMON_WORDS
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(keys, list) or not keys or not all(isinstance(k, str) and k for k in keys):
        raise ValueError(f"{file} must hold a list of words, got {keys!r:.60}")
    return tuple(keys)


def draw_pair(rng: random.Random, keys: Sequence[str]) -> tuple[str, str]:
    """A key and a six-digit number which training never put together."""
    while True:
        key, number = rng.choice(keys), f"{rng.randrange(10**6):06d}"
        if is_held_out(f"{key}:{number}", share=HELD_OUT_PAIRS):
            return key, number


def needle_prompt(
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    depth: float,
    seed: int | str = 0,
    keys: Sequence[str] = COMMON_WORDS,
    text: str | None = None,
    source: str = "a text",
) -> Prompt:
    """A prompt of `context` tokens or a few less, with one needle `depth` of the way through.

    The prose starts at a sentence drawn from `seed` and goes on from the beginning when it ends.

    Args:
        context: tokens of the whole prompt, question and template included.
        depth: of the needle, from 0 (start) to 1 (end).
        seed: draws where the text begins, the key and the number.
        keys: words to draw the key from.
        text: the prose; by default the held-out topics of the language reference.
        source: what `text` is, for the caption.

    Raises:
        ValueError: `context` is too small for needle and question, `depth` is outside [0, 1], or
            `text` has no text.
    """
    if text is None:
        text = "\n\n".join(topics(held_out=True))
        source = "the Python language reference"
    text = text.strip()
    if not text:
        raise ValueError(f"{source} is empty")
    rng = random.Random(str(seed))
    key, number = draw_pair(rng, keys)
    start = rng.choice([0, *sentence_ends(text)])
    prose = f"{text[start:]}\n\n{text[:start]}\n\n".lstrip()

    def build(chars: int) -> list[int]:
        body = cut_at_word(prose, chars)
        hay = insert_needle(body, key=key, number=number, depth=depth)
        return encode_prompt(tokenizer, hay.document, hay.question)

    ids = fit(build, context)
    needle = NEEDLE.format(key=key, number=number)
    caption = (
        f"a haystack of {len(ids)} tokens of prose ({source}) with the needle “{needle}” "
        f"{depth:.0%} of the way through; seed {seed}"
    )
    return Prompt(ids, number, caption)


def cut_at_word(text: str, chars: int) -> str:
    """At most `chars` characters of `text`, over and over if need be, up to the end of a word.

    Longer runs without a space, such as underlines, are cut where they are.
    """
    part = (text * (chars // len(text) + 1))[: chars + 1]
    end = max(part.rfind(" "), part.rfind("\n"), 0)
    return part[:chars] if chars - end > LONGEST_WORD else part[:end]


def fit(build: Callable[[int], list[int]], context: int) -> list[int]:
    """The longest prompt that `build` makes from some number of characters within `context` tokens.

    Raises:
        ValueError: even the prompt without any text is longer.
    """
    best = build(0)
    empty = len(best)
    if empty > context:
        raise ValueError(f"context is {context} tokens, but needle and question alone take {empty}")
    low, high, chars_per_token = 0, None, 4.0
    for _ in range(16):
        room = context - len(best)
        guess = low + max(int(room * chars_per_token), 1)
        if high is not None and guess >= high:
            guess = (low + high) // 2
        if room <= SLACK or guess == low:
            break
        ids = build(guess)
        chars_per_token = guess / max(len(ids) - empty, 1)
        if len(ids) > context:
            high = guess
        else:
            low, best = guess, ids
    return best
