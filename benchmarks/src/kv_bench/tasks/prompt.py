"""From a sample to token ids: context, then one part per question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_bench.tasks.base import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\N{BLACK SQUARE}\N{WHITE SQUARE}"


@dataclass(frozen=True)
class Encoded:
    """Token ids of a sample.

    context: everything up to the first question. questions: per question what the model reads
    before it answers: the question, the template's turn and the answer's prefix; from the second
    on also the end of the answer before it.
    """

    context: list[int]
    questions: list[list[int]]

    def tokens(self, max_new_tokens: int) -> int:
        """Of the prompt and all answers together."""
        asked = sum(map(len, self.questions))
        return len(self.context) + asked + max_new_tokens * len(self.questions)


def encode(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Encoded:
    """Token ids of `sample`: the chat template's turns if there is one, else plain text.

    Context and question are encoded apart, so that a method which compresses the context alone and
    one which compresses both read the same ids.
    """
    opening, before, between = turns(tokenizer)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    context = ids(opening + sample.context)
    if tokenizer.chat_template is None:
        context = [*prefix_ids(tokenizer), *context]
    first, *later = sample.questions
    asked = [ids(first + before + sample.answer_prefix)]
    asked += [
        ids(between + question.lstrip() + before + sample.answer_prefix) for question in later
    ]
    return Encoded(context, asked)


def turns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """What stands before the user's text, between it and the answer, and between that and the
    user's next text."""
    if tokenizer.chat_template is None:
        return "", "", "\n"

    def render(messages: list[dict[str, str]]) -> str:
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return str(tokenizer.apply_chat_template(messages, **options))

    user, answer = {"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}
    opening, before = render([user]).split(MARK)
    between = render([user, answer, user]).split(MARK)[2]
    return opening, before, between


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Special tokens that the tokenizer puts before a text, such as BOS."""
    marked = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    at = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
    return marked[:at]
