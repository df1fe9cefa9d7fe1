"""A cache filled with random keys and values, layer by layer, as if a prompt had passed the model.

For decoding at lengths whose prefill would take too long or too much memory: the method compresses
each layer's keys and values before the next layer's are drawn, so no more than one layer is whole
at a time, and no attention over the prompt is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kv_integration import KVCache
from kv_integration.surprise import PromptSurprisal

MEAN_NATS = 2.5  # of drawn surprisal, which is as skewed as that of text


class NoFillError(ValueError):
    """A cache that random keys, values and queries cannot fill."""


def fill(model: PreTrainedModel, cache: Cache, *, batch: int, tokens: int, seed: int = 0) -> Cache:
    """`cache`, of ours or a DynamicCache, after a prompt of `batch` rows of `tokens` tokens.

    Keys and values are normal random numbers, queries too, as many as the method observes. A method
    that needs the prompt's surprisal is given exponentially distributed numbers before the first
    layer comes, so that it, too, compresses layer by layer, where a prompt waits for its end.

    Raises:
        NoFillError: the model has sliding-window layers.
    """
    config: Any = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rng = torch.Generator(device=model.device).manual_seed(seed)

    def draw(heads: int, count: int) -> Tensor:
        shape = (batch, heads, count, head_dim)
        return torch.randn(shape, generator=rng, device=model.device, dtype=model.dtype)

    def key_values() -> tuple[Tensor, Tensor]:
        heads = config.num_key_value_heads
        return draw(heads, tokens), draw(heads, tokens)

    if not isinstance(cache, KVCache):
        for number in range(config.num_hidden_layers):
            cache.update(*key_values(), number)
        return cache
    if len(cache.compressed) != config.num_hidden_layers:
        raise NoFillError("sliding-window layers cannot be filled with random entries")
    ids = torch.randint(
        config.vocab_size, (batch, tokens), generator=rng, device=model.device, dtype=torch.int64
    )
    observed = min(max(cache.method.observe, 1), tokens)
    cache.enter(ids, None)
    if cache.surprise is not None:
        drawn = torch.empty(batch, tokens, device=model.device)
        cache.surprise = Drawn(drawn.exponential_(1 / MEAN_NATS, generator=rng))
        cache.leave(ids)
    for layer in cache.compressed:
        keys, values = key_values()
        queries = draw(config.num_attention_heads, observed)
        layer.attend(queries, keys, values, scale=head_dim**-0.5, exact=_nothing)
    cache.plan.compressed()
    return cache


class Drawn(PromptSurprisal):
    """Surprisal that was drawn, not computed: `values` float32[B, T], in nats."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        values[:, 0] = 0.0  # nothing predicts the first token

    def add(self, hidden: Tensor, ids: Tensor, valid: Tensor | None) -> None:
        """Nothing is left to find out."""

    def rows(self) -> list[Tensor]:
        return list(self.values)


def _nothing(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The prompt's attention, which nobody reads here."""
    return queries
