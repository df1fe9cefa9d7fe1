"""From a sample to token ids: context, then one part per question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """Token ids of `sample`: the chat template's turns if there are, else plain text.

    Context and question are encoded apart, so that a method which compresses the context alone and
    one which compresses both read the same ids.
    """
    chat = sample.chat and tokenizer.chat_template is not None
    opening, before, between = turns(tokenizer) if chat else ("", "", "\n")
    after = before + sample.answer_prefix

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    context = ids(opening + sample.context)
    if not chat:
        context = [*prefix_ids(tokenizer), *context]
    first, *later = sample.questions
    asked = [ids(first + after), *(ids(between + text.lstrip() + after) for text in later)]
    return Encoded(context, asked)


def turns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """What the chat template puts before the user's text, between it and the answer, and between
    that and the user's next text.

    Raises:
        ValueError: the template does not show each text once.
    """

    def render(messages: list[dict[str, str]]) -> list[str]:
        options: Any = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return str(tokenizer.apply_chat_template(messages, **options)).split(MARK)

    user, answer = {"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}
    one, two = render([user]), render([user, answer, user])
    if (len(one), len(two)) != (2, 4):
        raise ValueError(
            "the tokenizer's chat template must show each message's text once, but a chat of three "
            f"texts shows {len(two) - 1}"
        )
    return one[0], one[1], two[2]


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Special tokens that the tokenizer puts before a text, such as BOS."""
    marked = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    at = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
    return marked[:at]
