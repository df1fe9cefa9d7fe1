"""Middle truncation: what a prompt loses when it is longer than the model's context."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kv_bench.tasks.base import Sample
from kv_bench.tasks.prompt import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def truncate_middle(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, length: int | None
) -> Sample:
    """`sample` with the middle of its prompt left out, so that prompt and answer fit `length`.

    As LongBench (`pred.py`) and InfiniteBench (`eval_yarn_mistral.py`) do: the first and the last
    half of the tokens stay. The last half ends with the question, which loses its beginning only
    where it is longer than that. Unlike there, what stays is encoded again and cut further where
    decoding made it longer, so the bound holds.

    Raises:
        ValueError: `length` leaves no token of the prompt.
    """
    if length is None:
        return sample
    whole = encode(tokenizer, sample).tokens(sample.max_new_tokens)
    if whole <= length:
        return sample

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(part: list[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(part, **options))

    context, question = ids(sample.context), ids(sample.questions[0])
    half = (len(context) + len(question) - (whole - length)) // 2
    while half > 0:
        tail = half - len(question)
        kept = text(context[:half]) + (text(context[-tail:]) if tail > 0 else "")
        asked = sample.questions[0] if tail >= 0 else text(question[-half:])
        cut = replace(
            sample, context=kept, questions=(asked,), extra={**sample.extra, "truncated": True}
        )
        excess = encode(tokenizer, cut).tokens(cut.max_new_tokens) - length
        if excess <= 0:
            return cut
        half -= -(-excess // 2)
    raise ValueError(
        f"length is {length} tokens, but {sample.max_new_tokens} for the answer and the chat "
        "template leave none for the prompt"
    )
