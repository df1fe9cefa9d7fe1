"""One method's answer with what was expected, as the commands print it."""

from __future__ import annotations

from dataclasses import dataclass

from kv_integration.answer import Answer, is_correct, run_method
from kv_integration.cli.inputs import DYNAMIC, Loaded, make_method
from kv_integration.cli.progress import Steps
from kv_integration.haystack import Prompt

JSON_FIELDS = (
    "prompt_tokens",
    "entries_attended",
    "device_bytes",
    "host_bytes",
    "full_kv_bytes",
    "ttft_s",
    "per_token_s",
)


@dataclass(frozen=True)
class Result:
    """An answer of the method called `name`, beside the one that was expected if that is known."""

    name: str
    answer: Answer
    expected: str | None

    @property
    def correct(self) -> bool | None:
        """Whether the answer is right; None when nobody knows."""
        return None if self.expected is None else is_correct(self.answer.answer, self.expected)

    @property
    def label(self) -> str:
        """The method's name for people."""
        return f"{self.name} (transformers)" if self.name == DYNAMIC else self.name

    @property
    def verdict(self) -> str:
        """`right`, `wrong`, or `-` when nobody knows."""
        return {True: "right", False: "wrong", None: "-"}[self.correct]

    def as_dict(self) -> dict[str, object]:
        """The fields of `--json`."""
        answer = self.answer
        return {
            "answer": answer.answer,
            "expected": self.expected,
            "correct": self.correct,
            "method": self.name,
            "budget": answer.budget,
            **{name: getattr(answer, name) for name in JSON_FIELDS},
        }


def answer_with(
    name: str,
    budget: int | float,
    *,
    loaded: Loaded,
    prompt: Prompt,
    max_new_tokens: int,
    steps: Steps,
) -> Result:
    """Let the method called `name` answer `prompt`."""
    method = make_method(name, budget)
    title = f"{name}: {len(prompt.ids)} tokens in, {max_new_tokens} out"
    with steps.step(title, total=max_new_tokens) as step:
        answer = run_method(
            loaded.model,
            loaded.tokenizer,
            prompt.ids,
            method,
            max_new_tokens=max_new_tokens,
            on_token=step.advance,
        )
    return Result(name, answer, prompt.expected)
