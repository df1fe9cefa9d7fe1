"""Prompts with several needles, asked for one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kv_integration import haystack

ANSWER = "ANSWER-OF-THE-TURN-BEFORE"


@dataclass(frozen=True)
class Conversation:
    """A document with needles and the questions for them.

    ids: tokens of the document and the first question. later: tokens of each later turn, from the
    end of the answer before it. expected: the answers.
    """

    ids: list[int]
    later: list[list[int]]
    expected: list[str]


def conversation(
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    turns: int,
    seed: int | str,
    keys: Sequence[str] = haystack.COMMON_WORDS,
    text: str | None = None,
) -> Conversation:
    """A first prompt of `context` tokens or a few less, with one needle for each of the turns.

    Needles lie evenly from start to end and are asked for in an order drawn from `seed`, as are
    the place where the prose starts, the keys and the numbers.

    Args:
        context: tokens of the first prompt, question and template included.
        keys: words to draw the needles' keys from, each for one needle.
        text: the prose; by default the held-out topics of the language reference.

    Raises:
        ValueError: there are fewer keys than turns, `context` is too small for the needles, or
            `text` has no text.
    """
    if len(set(keys)) < turns:
        raise ValueError(f"--turns is {turns}, but needles have only {len(set(keys))} keys")
    text = ("\n\n".join(haystack.topics(held_out=True)) if text is None else text).strip()
    if not text:
        raise ValueError("the haystack is empty")
    rng = random.Random(str(seed))
    pairs: dict[str, str] = {}
    while len(pairs) < turns:
        key, number = haystack.draw_pair(rng, keys)
        pairs.setdefault(key, number)
    start = rng.choice([0, *haystack.sentence_ends(text)])
    prose = f"{text[start:]}\n\n{text[:start]}\n\n".lstrip()
    needles = [haystack.NEEDLE.format(key=key, number=number) for key, number in pairs.items()]
    asked = rng.sample(list(pairs), turns)
    questions = [haystack.QUESTION.format(key=key) for key in asked]

    def build(chars: int) -> list[int]:
        document = with_needles(haystack.cut_at_word(prose, chars), needles)
        return haystack.encode_prompt(tokenizer, document, questions[0])

    return Conversation(
        haystack.fit(build, context),
        [later_turn(tokenizer, question) for question in questions[1:]],
        [pairs[key] for key in asked],
    )


def with_needles(text: str, needles: Sequence[str]) -> str:
    """`text` with each needle between two of its sentences, evenly from start to end."""
    ends = [0, *haystack.sentence_ends(text), len(text)]
    parts, before = [], 0
    for number, needle in enumerate(needles):
        wanted = (number + 0.5) / len(needles) * len(text)
        at = min(ends, key=lambda end: abs(end - wanted))
        parts += [text[before:at], needle]
        before = at
    parts.append(text[before:])
    return " ".join(part.strip(" ") for part in parts if part)


def later_turn(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Tokens of a turn that asks `question`, from the end of the answer before it."""
    if tokenizer.chat_template is None:
        text = f"\n\nQuestion: {question}\nAnswer:"
    else:
        roles = ("user", question), ("assistant", ANSWER), ("user", question)
        messages = [{"role": role, "content": content} for role, content in roles]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = str(chat).rpartition(ANSWER)[2]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
