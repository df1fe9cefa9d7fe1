"""Answers of several methods to a batch of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kv_bench.shared import Shared
from kv_integration import Attached, KVCache, Method, attach
from kv_integration.answer import GREEDY, decode_answer, end_tokens, pad_token


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    methods: Sequence[Method],
    *,
    max_new_tokens: int,
) -> list[list[str]]:
    """Greedy answers, one list per method and in it one text per prompt.

    Each is what `generate` gives with that method alone. The prompts pass the model once for all
    methods if every layer is held by the method, and once per method if the model has
    sliding-window layers, whose own cache cannot go back.
    """
    ends = end_tokens(model, tokenizer)
    pad = pad_token(tokenizer, ends)
    ids, mask = left_padded(prompts, pad, model.device)
    with attach(model, tokenizer) as kv:
        plain = holds_every_layer(kv, methods[0])
        groups = [list(methods)] if plain else [[method] for method in methods]
        found = []
        for group in groups:
            shared = Shared(group)
            cache = kv.cache(shared)
            generator = Generator(model, ends, pad, cache)
            first = generator.more(ids, mask, 1)
            for index in range(len(group)):
                shared.choose(index)
                output = first
                if max_new_tokens > 1 and not generator.finished(first[:, ids.shape[1] :]):
                    output = generator.more(first, mask, max_new_tokens - 1)
                new = output[:, ids.shape[1] :].tolist()
                found.append([decode_answer(tokenizer, row, ends) for row in new])
                if index + 1 < len(group):
                    cache.crop(ids.shape[1] - cache.get_seq_length())
        return found


def holds_every_layer(kv: Attached, method: Method) -> bool:
    """Whether no layer of the model has a sliding window, whose own cache cannot go back."""
    layers = kv.model.config.get_text_config(decoder=True).num_hidden_layers
    return len(kv.cache(method).compressed) == int(layers)


class Generator:
    """Stock `generate`, called in parts on one cache."""

    def __init__(self, model: PreTrainedModel, ends: set[int], pad: int, cache: KVCache) -> None:
        self._generate: Any = model.generate
        self._ends, self._cache = sorted(ends), cache
        self._options = {**GREEDY, "eos_token_id": self._ends or None, "pad_token_id": pad}

    def more(self, ids: Tensor, mask: Tensor, count: int, **options: Any) -> Tensor:
        """`ids` [B, T] and up to `count` tokens more; `mask` [B, <= T], 0 for padding.

        options: more of `generate`, such as a streamer.
        """
        ones = mask.new_ones(mask.shape[0], ids.shape[1] - mask.shape[1])
        full_mask = torch.cat([mask, ones], dim=1)
        output: Tensor = self._generate(
            ids,
            attention_mask=full_mask,
            past_key_values=self._cache,
            max_new_tokens=count,
            **self._options,
            **options,
        )
        return output

    def finished(self, new: Tensor) -> bool:
        """Whether every row of `new` [B, n] holds an end token."""
        ends = torch.tensor(self._ends, dtype=new.dtype, device=new.device)
        return bool(torch.isin(new, ends).any(dim=1).all())


def left_padded(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Prompts as ids and mask [B, longest], padding on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
