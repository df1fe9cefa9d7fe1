"""Attach to a transformers model so that stock `generate()` runs on our caches, and detach again.

Put on the model and taken off again: an attention function of our own (chosen by
`set_attn_implementation`), a hook on the decoder that tells the cache which tokens come, on each
attention module a `forward` that hands the cache to the attention function (a hook would cost a
decoding step several times as much), a `generate` that tells the cache how long the prompt is
before it calls the model's own, a `prepare_inputs_for_generation` that does not lose it, and on the
decoder a `forward` that tells a prompt's end from what follows.
Without one of our caches in the call, all of them pass everything through.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from itertools import zip_longest
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kv_integration.cache import KVCache, cache_in
from kv_integration.layer import CompressedLayer
from kv_integration.lookahead import Lookahead
from kv_integration.method import Context, Method
from kv_integration.modules import attention_modules, decoder_of
from kv_integration.rope import Turn, takes_tables, turn_of
from kv_integration.saved import load
from kv_integration.surprise import LMHead

PREFIX = "kv_integration_"
UNSUPPORTED = {
    "kv_lora_rank": "its attention keeps a latent cache (MLA)",
    "attn_logit_softcapping": "its attention caps the logits",
}
# What some families hand to their attention function, and our caches would leave out.
NOT_HONOURED = ("s_aux", "sinks", "softcap", "position_bias", "indices", "block_indices")
_active: ContextVar[KVCache | None] = ContextVar("kv_integration_active_cache", default=None)


class Attached:
    """A model that can run on our caches; `detach`, or the end of a `with` block, undoes it."""

    def __init__(self, model: PreTrainedModel, tokenizer: object | None = None) -> None:
        check_supported(model)
        self.model = model
        self.context = Context(tokenizer, LMHead.of(model))
        self._original = model.config._attn_implementation
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        decoder = decoder_of(model)
        modules = attention_modules(decoder)
        wrapped: list[tuple[nn.Module, str, Callable[..., Any]]] = [
            *((model, name, wrapper) for name, wrapper in WRAPPED.items()),
            (decoder, "forward", functools.partial(_in_two, decoder)),
        ]
        for module, following in zip_longest(modules, modules[1:]):
            ahead = None if following is None else Lookahead(following)
            wrapped.append((module, "forward", functools.partial(_handing_over, module, ahead)))
        self._own = [(module, name, module.__dict__.get(name)) for module, name, _ in wrapped]
        name = register(self._original)
        try:
            model.set_attn_implementation(name)
            self._hooks += [
                decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
                decoder.register_forward_hook(_leave, always_call=True),
            ]
            for module, method, wrapper in wrapped:
                module.__dict__[method] = wrapper(getattr(module, method))
        except BaseException:
            self.detach()
            raise

    def cache(
        self,
        method: Method,
        *,
        prompt_length: int | None = None,
        recompress_after: int | None = None,
    ) -> KVCache:
        """A new, empty cache for this model; `KVCache` says what the options do.

        Raises:
            ValueError: `method` undoes the keys' RoPE, and this model has none.
        """
        if getattr(method, "rope", None) and not any(
            takes_tables(module) for module in attention_modules(decoder_of(self.model))
        ):
            raise ValueError(
                f"{method.name} takes keys back to before their RoPE, but the attention of "
                f"{type(self.model).__name__} is given no cos and sin"
            )
        return KVCache(
            self.model.config,
            method.bound(self.model) if isinstance(method, Method) else method,
            self.context,
            prompt_length=prompt_length,
            recompress_after=recompress_after,
            owner=self.model,
        )

    def load(self, path: str | os.PathLike[str], method: Method) -> KVCache:
        """The cache that `KVCache.save` wrote, to go on with; on this model's devices.

        method: with the settings that it was saved with.

        Raises:
            CacheFileError: the file is foreign, truncated, altered or of a newer format, or of
                another model, dtype, method or setting (kv-offload's subclasses say which).
            OSError: the file cannot be read.
        """
        cache = self.cache(method)
        load(cache, path, self.model)
        return cache

    def detach(self) -> None:
        """Take everything off the model again; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for module, name, own in self._own:
            module.__dict__.pop(name, None)
            if own is not None:
                module.__dict__[name] = own
        if (self.model.config._attn_implementation or "").startswith(PREFIX):
            self.model.set_attn_implementation(self._original)

    def _enter(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the decoder runs: tell our cache, if one is used, which tokens come."""
        cache = cache_in(args, kwargs)
        _active.set(None)
        if cache is None:
            return
        if not cache.belongs_to(self.model):
            raise ValueError("this cache was made for another model; make one for this model")
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            raise ValueError("inputs_embeds is not supported: our caches read input_ids")
        if cache.cut(ids.shape[1]):
            return  # `_in_two` calls the decoder for each part
        cache.enter(ids, kwargs.get("attention_mask"))
        _active.set(cache)

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


def check_supported(model: PreTrainedModel) -> None:
    """Raise if the model's attention is of a kind that our caches cannot hold."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    name = type(model).__name__
    if (model.config._attn_implementation or "").startswith(PREFIX):
        raise ValueError(
            f"{name}, or a model that shares its config object, is attached already: detach() it "
            "first"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} cannot be attached: it is an encoder-decoder model")
    config = model.config.get_text_config(decoder=True)
    for field, reason in UNSUPPORTED.items():
        if getattr(config, field, None) is not None:
            raise ValueError(f"{name} cannot be attached: {reason} ({field} is set)")
    modules = attention_modules(model)
    if not modules or not model._can_set_attn_implementation():
        raise ValueError(f"{name} cannot be attached: it has no exchangeable attention function")
    if any(getattr(module, "sinks", None) is not None for module in modules):
        raise ValueError(f"{name} cannot be attached: its attention has sink logits")
    layers = len(KVCache(model.config, _Probe(), Context(None)).layers)
    found = {int(module.layer_idx) for module in modules}  # type: ignore[arg-type]
    if found != set(range(layers)):
        raise ValueError(
            f"{name} cannot be attached: it has {layers} layers, but attention of a known kind "
            f"only in {sorted(found)}"
        )


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
        kv_turn: Turn | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if kv_layer is None:
            run = own_attention(module, original)
            return run(module, query, key, value, attention_mask, **options)
        for option in NOT_HONOURED:
            if options.get(option) is not None:
                raise ValueError(
                    f"{type(module).__name__} asks its attention for {option!r}, which our caches "
                    "do not honour"
                )
        if attention_mask is not None:  # `mask` below made none
            raise ValueError(
                f"{type(module).__name__} gives its attention a mask of its own, which our caches "
                "do not honour"
            )

        def exact(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            mask = original_mask(
                batch_size=queries.shape[0],
                q_length=queries.shape[2],
                kv_length=queries.shape[2],
                dtype=queries.dtype,
                device=queries.device,
            )
            run = own_attention(module, original)
            return run(module, queries, keys, values, mask, **options)[0].transpose(1, 2)

        scale = options.get("scaling") or query.shape[-1] ** -0.5
        out = kv_layer.attend(query, key, value, scale=scale, exact=exact, turn=kv_turn)
        return out.transpose(1, 2), None

    def mask(*args: Any, **options: Any) -> Any:
        # A compressed layer works out its own mask; one of [T, T] would be made for nothing.
        if _active.get() is not None and options.get("local_size") is None:
            return None
        return original_mask(*args, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def own_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    """The attention function that transformers knows under `name` for a module."""
    # "eager" is not registered: every modeling file has its own.
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _announcing(generate: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` that first tells one of our caches, if it is used, how long the prompt is.

    The forward passes alone do not show it: they may bring the prompt in chunks, or a draft model's
    candidates together with it.
    """

    @functools.wraps(generate)
    def announced(inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if not isinstance(cache, KVCache) or not isinstance(ids, Tensor):
            return generate(inputs, *args, **kwargs)
        if 0 < ids.shape[1] <= cache.tokens:
            raise ValueError(
                f"input_ids has {ids.shape[1]} tokens, but this cache has seen {cache.tokens}: "
                "a later turn brings the whole conversation, its new tokens last; reset() the "
                "cache for a new prompt"
            )
        cache.expect(ids.shape[1])
        try:
            return generate(inputs, *args, **kwargs)
        except BaseException:
            cache.expect(None)
            raise

    return announced


def _keeping(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_inputs_for_generation` whose model may not do without our cache.

    Phi-3 drops its cache at the length where its RoPE changes, for all keys to be rotated anew. It
    brings all tokens again then: ours starts over with them as its prompt.
    """

    @functools.wraps(prepare)
    def kept(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        cache = kwargs.get("past_key_values")
        if isinstance(cache, KVCache) and inputs.get("past_key_values") is None:
            cache.reset()
            inputs["past_key_values"] = cache
        return inputs

    return kept


WRAPPED = {"generate": _announcing, "prepare_inputs_for_generation": _keeping}


def _in_two(decoder: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decoder's `forward` that runs the end of a prompt and what follows it one after the other,
    where the cache's method must have seen the whole prompt before it can answer."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        cache = cache_in(args, kwargs)
        if cache is None or _active.get() is cache:
            return forward(*args, **kwargs)
        ids: Tensor = args[0] if args else kwargs["input_ids"]
        new = ids.shape[1]
        cut = cache.cut(new)
        mask, seen = kwargs.get("attention_mask"), cache.tokens

        def part(x: Any, columns: slice) -> Any:
            if not isinstance(x, Tensor) or x.is_floating_point():
                return x
            if mask is not None and x is mask:
                return mask[:, : seen + columns.stop]
            return x[..., columns] if x.shape[-1] == new else x

        outputs = [
            decoder(
                *(part(x, columns) for x in args),
                **{name: part(x, columns) for name, x in kwargs.items()},
            )
            for columns in (slice(0, cut), slice(cut, new))
        ]
        return _joined(*outputs)

    return run


def _joined(first: Any, second: Any) -> Any:
    """Outputs of a decoder for tokens that follow each other, as one."""
    if isinstance(second, tuple):
        return (torch.cat([first[0], second[0]], 1), *second[1:])
    second["last_hidden_state"] = torch.cat([first[0], second[0]], 1)
    if second.get("hidden_states") is not None:
        pairs = zip(first["hidden_states"], second["hidden_states"], strict=True)
        second["hidden_states"] = tuple(torch.cat(pair, 1) for pair in pairs)
    return second


def _leave(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """After the decoder ran, or failed: `output` is None then."""
    cache = _active.get()
    _active.set(None)
    if cache is not None and output is not None and cache.surprise is not None:
        cache.leave(output[0])


def _handing_over(
    module: nn.Module, ahead: Lookahead | None, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """An attention module's `forward` that gives its attention function the cache's layer.

    And what it is told about RoPE, if the method wants that. ahead: asks the module after it.
    """
    number = int(module.layer_idx)  # type: ignore[arg-type]

    @functools.wraps(forward)
    def handed(*args: Any, **kwargs: Any) -> Any:
        cache = cache_in(args, kwargs)
        layer = None if cache is None else cache.layers[number]
        if cache is not None and isinstance(layer, CompressedLayer):
            if ahead is not None:
                ahead(cache, args, kwargs)
            if cache.method.rope:
                kwargs["kv_turn"] = turn_of(module, args, kwargs, cache, cache.context.rotations)
            kwargs["kv_layer"] = layer
        return forward(*args, **kwargs)

    return handed
