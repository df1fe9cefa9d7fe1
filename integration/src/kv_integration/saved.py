"""Caches as files: a conversation is saved, and goes on from the file as if nothing had been."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from kv_integration.fingerprint import model_fingerprint
from kv_integration.layer import CompressedLayer, SlidingLayer
from kv_integration.method import Method
from kv_integration.modules import attention_modules, decoder_of
from kv_integration.settings import describe, settings
from kv_integration.storable import Packer, Unpacker
from kv_offload import CacheFileError, load_cache, save_cache

if TYPE_CHECKING:
    from kv_integration.cache import KVCache

FORMAT = 2  # of what is stored about a cache; rises when attributes change their meaning
CACHE = ("tokens", "prompt_tokens", "row_tokens", "row_seen", "prompt_length", "recompress_after")
COMPRESSED = ("seen", "since", "token_bytes", "batch_size", "scale", "rope", "latest", "state")
SLIDING = ("keys", "values", "cumulative_length", "record_past")


def save(cache: KVCache, path: str | os.PathLike[str], model: PreTrainedModel) -> None:
    """Write `cache` of `model`; `KVCache.save` says how and what it raises."""
    whole = all(x.seen == cache.tokens and x.state is not None for x in cache.compressed)
    if not (cache.prompt_complete and whole):
        raise ValueError(
            f"there is no whole prompt in this cache to be saved: of {cache.tokens} tokens its "
            f"layers hold {sorted({layer.seen for layer in cache.compressed})}"
        )
    packer = Packer(_known(cache.method))
    try:
        plan = packer.pack(cache.plan, "plan")
        layers = [
            {
                name: packer.pack(getattr(layer, name), f"layers.{number}.{name}")
                for name in _attributes(layer)
            }
            for number, layer in enumerate(cache.layers)
        ]
        ropes = packer.pack(cache.ropes, "ropes")  # each is some layer's
    except ValueError as error:
        raise ValueError(f"a cache of {cache.method.name} cannot be saved: {error}") from error
    extra = {
        "format": FORMAT,
        "settings": describe(cache.method),
        "dtype": str(model.dtype),
        "cache": {name: getattr(cache, name) for name in CACHE},
        "plan": plan,
        "layers": layers,
        "ropes": ropes,
    }
    save_cache(
        path,
        packer.tensors,
        method=cache.method.name,
        fingerprint=model_fingerprint(model),
        extra=extra,
    )


def load(cache: KVCache, path: str | os.PathLike[str], model: PreTrainedModel) -> None:
    """Fill the new, empty `cache`; `Attached.load` says how and what it raises."""
    file = load_cache(path, fingerprint=model_fingerprint(model))
    found = file.extra
    for what, have, wanted in (
        ("format", found.get("format"), FORMAT),
        ("method", found.get("settings"), describe(cache.method)),
        ("dtype", found.get("dtype"), str(model.dtype)),
    ):
        if have != wanted:
            raise CacheFileError(f"{path} was saved with {what} {have}, wanted {wanted}")
    for name in CACHE:
        setattr(cache, name, found["cache"][name])
    reader = Unpacker(_known(cache.method), file.tensors, model.device)
    cache.plan = reader.unpack(found["plan"])
    cache.prompt_complete, cache.surprise = True, None
    devices, layers = _devices(model), list[Any](cache.layers)
    for number, (layer, node) in enumerate(zip(layers, found["layers"], strict=True)):
        reader.device = devices.get(number, model.device)
        fields = {name: reader.unpack(part) for name, part in node.items()}
        if isinstance(layer, SlidingLayer):
            layer.lazy_initialization(fields["keys"], fields["values"])
        layer.device = reader.device
        vars(layer).update(fields)
    cache.ropes = reader.unpack(found["ropes"])


def _known(method: Method) -> dict[str, object]:
    """What whoever loads has, too: the method and what it was given."""
    return {"method": method} | {f"method.{name}": x for name, x in settings(method).items()}


def _attributes(layer: Any) -> tuple[str, ...]:
    return COMPRESSED if isinstance(layer, CompressedLayer) else SLIDING


def _devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer's attention is."""
    modules = attention_modules(decoder_of(model))
    return {
        int(getattr(module, "layer_idx")): next(module.parameters()).device  # noqa: B009 - untyped
        for module in modules
    }
