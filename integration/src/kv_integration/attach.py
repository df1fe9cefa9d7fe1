"""Attach to a transformers model so that stock `generate()` runs on our caches, and detach again.

Three things are put on the model and taken off again: an attention function of our own (chosen by
`set_attn_implementation`), a hook on the decoder that tells the cache which tokens come, and a hook
on each attention module that hands the cache to the attention function. Without one of our caches
in the call, all three pass everything through to the model's own attention.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kv_integration.cache import KVCache
from kv_integration.layer import CompressedLayer
from kv_integration.method import Context, Method

PREFIX = "kv_integration_"
UNSUPPORTED = {
    "kv_lora_rank": "its attention keeps a latent cache (MLA)",
    "attn_logit_softcapping": "its attention caps the logits",
}
_active: ContextVar[KVCache | None] = ContextVar("kv_integration_active_cache", default=None)


class Attached:
    """A model that can run on our caches; `detach`, or the end of a `with` block, undoes it."""

    def __init__(self, model: PreTrainedModel, tokenizer: object | None = None) -> None:
        check_supported(model)
        self.model = model
        self.context = Context(tokenizer)
        self._original = model.config._attn_implementation
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        name = register(self._original)
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        try:
            model.set_attn_implementation(name)
            self._hooks += [
                decoder.register_forward_pre_hook(_enter, with_kwargs=True),
                decoder.register_forward_hook(_leave, always_call=True),
            ]
            for module in attention_modules(decoder):
                self._hooks.append(module.register_forward_pre_hook(_hand_over, with_kwargs=True))
        except BaseException:
            self.detach()
            raise

    def cache(self, method: Method, *, prompt_length: int | None = None) -> KVCache:
        """A new, empty cache for this model; see `KVCache` for `prompt_length`."""
        return KVCache(self.model.config, method, self.context, prompt_length=prompt_length)

    def detach(self) -> None:
        """Take everything off the model again; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if (self.model.config._attn_implementation or "").startswith(PREFIX):
            self.model.set_attn_implementation(self._original)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


def attach(model: PreTrainedModel, tokenizer: object | None = None) -> Attached:
    """Let `model` run on our caches.

        with attach(model, tokenizer) as kv:
            cache = kv.cache(SentenceKV(budget=1024))
            model.generate(**inputs, past_key_values=cache)

    Args:
        model: a decoder-only transformers model with full or sliding-window attention.
        tokenizer: the model's; needed by methods that cut the prompt at punctuation.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: the model cannot be attached; the text says why. Nothing is changed then.
    """
    return Attached(model, tokenizer)


def attention_modules(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's self-attention modules, in the order of its layers."""
    return [
        module
        for module in decoder.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]


def check_supported(model: PreTrainedModel) -> None:
    """Raise if the model's attention is of a kind that our caches cannot hold."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    name = type(model).__name__
    if (model.config._attn_implementation or "").startswith(PREFIX):
        raise ValueError(f"{name} is attached already: detach() it first")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} cannot be attached: it is an encoder-decoder model")
    config = model.config.get_text_config(decoder=True)
    for field, reason in UNSUPPORTED.items():
        if getattr(config, field, None) is not None:
            raise ValueError(f"{name} cannot be attached: {reason} ({field} is set)")
    modules = attention_modules(model)
    if not modules or not model._can_set_attn_implementation():
        raise ValueError(f"{name} cannot be attached: it has no exchangeable attention function")
    if any(hasattr(module, "sinks") for module in modules):
        raise ValueError(f"{name} cannot be attached: its attention has sink logits")
    KVCache(model.config, _Probe(), Context(None))


class _Probe(Method):
    """Stands in for a method while a model's layers are checked."""

    def compress(self, rows: Any, plan: Any) -> Any:
        raise TypeError("a probe holds no prompt")


def register(original: str) -> str:
    """Register our attention function over `original`, and its mask function; returns the name."""
    name = PREFIX + original
    original_mask = ALL_MASK_ATTENTION_FUNCTIONS[original]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        kv_layer: CompressedLayer | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # "eager" is not registered: every modeling file has its own.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        run = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        if kv_layer is None:
            return run(module, query, key, value, attention_mask, **options)

        def exact(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            mask = original_mask(
                batch_size=queries.shape[0],
                q_length=queries.shape[2],
                kv_length=queries.shape[2],
                dtype=queries.dtype,
                device=queries.device,
            )
            return run(module, queries, keys, values, mask, **options)[0].transpose(1, 2)

        scale = options.get("scaling") or query.shape[-1] ** -0.5
        out = kv_layer.attend(query, key, value, scale=scale, exact=exact)
        return out.transpose(1, 2), None

    def mask(*args: Any, **options: Any) -> Any:
        # A compressed layer works out its own mask; one of [T, T] would be made for nothing.
        if _active.get() is not None and options.get("local_size") is None:
            return None
        return original_mask(*args, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def _enter(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the decoder runs: tell our cache, if one is used, which tokens come."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, KVCache):
        _active.set(None)
        return
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        raise ValueError("inputs_embeds is not supported: our caches read input_ids")
    cache.enter(ids, kwargs.get("attention_mask"))
    _active.set(cache)


def _leave(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """After the decoder ran, or failed."""
    _active.set(None)


def _hand_over(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before an attention module runs: give its attention function the cache's layer."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, KVCache):
        layer = cache.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        if isinstance(layer, CompressedLayer):
            return args, {**kwargs, "kv_layer": layer}
    return None
