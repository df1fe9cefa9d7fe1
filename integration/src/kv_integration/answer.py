"""Let one method answer one prompt through stock `generate()`, and measure what that took."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from kv_integration.attach import attach
from kv_integration.method import Method

WARM_UP_TOKENS = 256
GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


@dataclass(frozen=True)
class Answer:
    """What a method answered, what it held at the end and how long it took.

    entries_attended: of the prompt, per step and KV head. Bytes by tier are those of the tensors
    that exist; full_kv_bytes is what the keys and values of all tokens seen take. ttft_s: seconds
    to the first token. per_token_s: median over the later ones, None if there was only one.
    """

    method: str
    budget: int | float
    answer: str
    prompt_tokens: int
    entries_attended: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    full_kv_bytes: int
    ttft_s: float
    per_token_s: float | None


def is_correct(answer: str, expected: str) -> bool:
    """Whether the first number in `answer` is `expected`."""
    found = re.search(r"\d+", answer)
    return found is not None and found[0] == expected


def run_method(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    method: Method | None,
    *,
    max_new_tokens: int = 24,
    on_token: Callable[[], object] | None = None,
) -> Answer:
    """Generate greedily from the prompt `ids` on a cache of `method`.

    All `max_new_tokens` are generated, so that there are enough to time; the text ends where the
    model wanted to stop. A short prompt runs first, unmeasured.

    Args:
        method: None for transformers' own DynamicCache on the model as it is.
        on_token: called after each measured token, for progress.

    Raises:
        ValueError: the prompt is empty, `max_new_tokens` is below 1, or the model cannot be
            attached.
    """
    if len(ids) == 0:
        raise ValueError("ids must hold at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    prompt = torch.tensor([list(ids)], device=model.device)
    # On a GPU kernels are chosen by shape, so only the prompt itself warms up what will run.
    warm = prompt if model.device.type == "cuda" else prompt[:, -WARM_UP_TOKENS:]
    if method is None:
        _generate(model, tokenizer, warm, DynamicCache(config=model.config), 2, None)
        dynamic = DynamicCache(config=model.config)
        text, clock = _generate(model, tokenizer, prompt, dynamic, max_new_tokens, on_token)
        size = cache_bytes(dynamic)
        held: dict[str, Any] = {
            "method": "dynamic",
            "budget": 1.0,
            "entries_attended": prompt.shape[1],
            "device_bytes": size,
            "host_bytes": 0,
            "disk_bytes": 0,
            "full_kv_bytes": size,
        }
    else:
        with attach(model, tokenizer) as kv:
            _generate(model, tokenizer, warm, kv.cache(method), 2, None)
            cache = kv.cache(method)
            text, clock = _generate(model, tokenizer, prompt, cache, max_new_tokens, on_token)
            report = cache.report()
        held = {
            "method": method.name,
            "budget": method.budget,
            "entries_attended": report.entries_attended,
            "device_bytes": report.device_bytes,
            "host_bytes": report.host_bytes,
            "disk_bytes": report.disk_bytes,
            "full_kv_bytes": report.full_kv_bytes,
        }
    return Answer(
        answer=text,
        prompt_tokens=prompt.shape[1],
        ttft_s=clock.first,
        per_token_s=clock.later,
        **held,
    )


class Clock(BaseStreamer):
    """Notes when each generated token arrives; `generate` hands over the prompt first."""

    def __init__(self, on_token: Callable[[], object] | None) -> None:
        self.times = [time.perf_counter()]
        self._on_token = on_token
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        if self._on_token is not None:
            self._on_token()

    def end(self) -> None:
        """Nothing is left to note."""

    @property
    def first(self) -> float:
        return self.times[1] - self.times[0]

    @property
    def steps(self) -> list[float]:
        """Seconds of each token after the first."""
        return [after - before for before, after in pairwise(self.times[1:])]

    @property
    def later(self) -> float | None:
        return median(self.steps) if self.steps else None


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Tensor,
    cache: Any,
    max_new_tokens: int,
    on_token: Callable[[], object] | None,
) -> tuple[str, Clock]:
    """The answer up to the first end token, and the times of all tokens."""
    ends = end_tokens(model, tokenizer)
    clock = Clock(on_token)
    generate: Any = model.generate
    output = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=pad_token(tokenizer, ends),
        streamer=clock,
        **GREEDY,
    )
    return decode_answer(tokenizer, output[0, prompt.shape[1] :].tolist(), ends), clock


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Token ids that end an answer."""
    configured = model.generation_config.eos_token_id
    ends = set(configured) if isinstance(configured, (list, tuple)) else {configured}
    return {token for token in (*ends, tokenizer.eos_token_id) if token is not None}


def pad_token(tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> int:
    """A token id to fill up with: the tokenizer's, or an end token, or any."""
    pad = tokenizer.pad_token_id
    return int(pad) if pad is not None else min(ends, default=0)


def decode_answer(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], ends: set[int]) -> str:
    """Text of `tokens` up to the first end token."""
    stop = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return str(tokenizer.decode(list(tokens[:stop]), skip_special_tokens=True)).strip()


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values in a cache of transformers."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor))
