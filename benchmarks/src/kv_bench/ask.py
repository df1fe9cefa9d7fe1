"""One sample's questions, answered by several methods behind one prefill."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kv_bench.answers import Generator, holds_every_layer
from kv_bench.shared import Shared
from kv_bench.tasks import Encoded
from kv_bench.tasks.base import cut
from kv_integration import KVCache, Method, Report, attach
from kv_integration.answer import Clock, decode_answer, end_tokens, pad_token


@dataclass(frozen=True)
class Reply:
    """What one method answered, one text per question, and what that took.

    report: of the cache after the last answer. shared: how many methods the prefill was for;
    prefill_s is its time in seconds, their compression included. ttft_s: from the prompt to the
    first token, None if the prefill was for several. per_token_s: median of the tokens after the
    first of each answer, None if there were none.
    """

    predictions: tuple[str, ...]
    report: Report
    shared: int
    prefill_s: float
    ttft_s: float | None
    per_token_s: float | None


def replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Encoded,
    methods: Sequence[Method],
    *,
    aware: bool,
    max_new_tokens: int,
    stop: Sequence[str] = (),
) -> list[Reply]:
    """Greedy answers of each method to the questions, which are turns of one conversation.

    aware: the prompt that is compressed ends with the first question (query-aware); else it is the
    context alone, and all questions are later turns on its cache (query-agnostic). Later turns are
    stored as they are, with the model's own answers before them.
    """
    ends = end_tokens(model, tokenizer)
    with attach(model, tokenizer) as kv:
        plain = holds_every_layer(kv, methods[0])
        groups = [list(methods)] if plain else [[method] for method in methods]
        found = []
        for group in groups:
            shared = Shared(group)
            cache = kv.cache(shared)
            talk = Talk(model, tokenizer, cache, ends, max_new_tokens, stop)
            talk.prefill(encoded, aware=aware)
            for index in range(len(group)):
                shared.choose(index)
                found.append(talk.hold(encoded, alone=len(group) == 1))
                if index + 1 < len(group):
                    talk.go_back()
        return found


class Talk:
    """A prompt on a cache, and questions about it, again and again from the prompt's end."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: KVCache,
        ends: set[int],
        max_new_tokens: int,
        stop: Sequence[str],
    ) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.ends, self.max_new_tokens, self.stop = ends, max_new_tokens, stop
        self.generator = Generator(model, ends, pad_token(tokenizer, ends), cache)

    @torch.no_grad()
    def prefill(self, encoded: Encoded, *, aware: bool) -> None:
        """The prompt passes the model; if it ends with a question, so does the first token come."""
        ids = [*encoded.context, *encoded.questions[0]] if aware else encoded.context
        self.prompt = torch.tensor([ids], device=self.model.device)
        self.asked = 1 if aware else 0
        start = time.perf_counter()
        if aware:
            self.first = self._generate(self.prompt, len(ids), 1)
        else:
            self.model(self.prompt, past_key_values=self.cache, logits_to_keep=1)
            self.first = self.prompt
        if self.prompt.is_cuda:
            torch.cuda.synchronize()
        self.prefill_s = time.perf_counter() - start

    def hold(self, encoded: Encoded, *, alone: bool) -> Reply:
        """All questions and answers after the prompt."""
        ids, texts, later = self.first, [], []
        ttft = self.prefill_s
        start = self.prompt.shape[1]
        if self.asked:
            if self.max_new_tokens > 1 and not self._ended(ids, start):
                clock = Clock(None)
                ids = self._generate(ids, start, self.max_new_tokens - 1, clock)
                later += clock.steps
            texts.append(self._text(ids, start))
        for number, question in enumerate(encoded.questions[self.asked :]):
            ids = torch.cat([self._open(ids, start), ids.new_tensor([question])], dim=1)
            start, clock = ids.shape[1], Clock(None)
            ids = self._generate(ids, start, self.max_new_tokens, clock)
            later += clock.steps
            if number == 0 and not self.asked:
                ttft += clock.first
            texts.append(self._text(ids, start))
        return Reply(
            predictions=tuple(texts),
            report=self.cache.report(),
            shared=len(self.cache.method.methods) if isinstance(self.cache.method, Shared) else 1,
            prefill_s=self.prefill_s,
            ttft_s=ttft if alone else None,
            per_token_s=median(later) if later else None,
        )

    def go_back(self) -> None:
        """Forget what came after the prompt."""
        self.cache.crop(self.prompt.shape[1] - self.cache.get_seq_length())

    def _generate(self, ids: Tensor, start: int, count: int, clock: Clock | None = None) -> Tensor:
        """Up to `count` tokens more; the answer began at token `start`."""

        def stopped(ids: Tensor, scores: Tensor, **options: object) -> Tensor:
            text = decode_answer(self.tokenizer, ids[0, start:].tolist(), set())
            return ids.new_full((1,), cut(text, self.stop) != text, dtype=torch.bool)

        criteria = [stopped] if self.stop else []
        return self.generator.more(
            ids, torch.ones_like(ids), count, streamer=clock, stopping_criteria=criteria
        )

    def _ended(self, ids: Tensor, start: int) -> bool:
        return self.generator.finished(ids[:, start:])

    def _open(self, ids: Tensor, start: int) -> Tensor:
        """`ids` without the end token of an answer, which the next turn brings itself."""
        ended = ids.shape[1] > start and int(ids[0, -1]) in self.ends
        return ids[:, :-1] if ended else ids

    def _text(self, ids: Tensor, start: int) -> str:
        text = decode_answer(self.tokenizer, ids[0, start:].tolist(), self.ends)
        return cut(text, self.stop)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; torch has no class for the host's."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def release() -> None:
    """Hand back what a failed attempt left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
