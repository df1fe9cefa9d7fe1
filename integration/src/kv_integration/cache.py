"""The cache that stock `generate()` runs on: a prompt compressed by a method, then what follows."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kv_integration.budget import budget_entries
from kv_integration.layer import CompressedLayer, SlidingLayer, in_order
from kv_integration.method import Context, Method, Plan
from kv_integration.report import LayerReport, Report
from kv_integration.rope import RopeTables, Turn
from kv_integration.saved import save
from kv_integration.surprise import PromptSurprisal
from kv_offload import storage_bytes


class KVCache(Cache):
    """One conversation's keys and values, held by `method`. Make it with `Attached.cache`.

    Layers with full attention are compressed; layers with a sliding window hold that window. All
    state is here: several caches on one model do not touch each other.

    Args:
        config: of the model.
        method: how the prompt is held.
        context: the model's surroundings (tokenizer).
        prompt_length: tokens of the prompt, padding included: compression waits until they all
            came, and tokens beyond them are no part of it. `generate` of an attached model says it
            by itself; None in a loop of forward passes: the first is the whole prompt.
        recompress_after: compress what is held, prompt and all, when more than so many tokens came
            since the last time, just before the next ones: memory stays bounded over long
            conversations. None: tokens after the prompt stay as they are.
        owner: the model itself, which may share its config with others; not kept alive.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: Method,
        context: Context,
        *,
        prompt_length: int | None = None,
        recompress_after: int | None = None,
        owner: PreTrainedModel | None = None,
    ) -> None:
        if not isinstance(method, Method):
            raise TypeError(f"method must be a kv_integration method, got {method!r}")
        if prompt_length is not None and prompt_length < 1:
            raise ValueError(f"prompt_length must be at least 1, got {prompt_length}")
        if recompress_after is not None and recompress_after < 1:
            raise ValueError(f"recompress_after must be at least 1, got {recompress_after}")
        if recompress_after is not None and not method.recompresses:
            raise ValueError(
                f"recompress_after is {recompress_after}, but {method.name} cannot compress again"
            )
        if method.needs_surprisal and context.head is None:
            raise ValueError(
                f"{method.name} needs the surprisal of the prompt, but this model has no LM head"
            )
        self.config, self.method, self.context = config, method, context
        self.prompt_length, self.recompress_after = prompt_length, recompress_after
        self._owner = None if owner is None else weakref.ref(owner)
        self._expected: int | None = None
        self.plan = Plan()
        self.ropes: list[RopeTables] = []
        self.fresh = 0
        self.prompt_valid: Tensor | None = None
        self.valid: Tensor | None = None
        self.order: Tensor | None = None
        self._prompt: list[tuple[Tensor, Tensor | None]] = []
        self.surprise = self._surprise()
        self._passing: Tensor | None = None
        self.row_tokens: list[int] = []
        self.row_seen: list[int] = []
        self.tokens = 0
        self.prompt_tokens = 0
        self.prompt_complete = False
        layers = DynamicCache(config=config).layers
        self._own = [self._layer(layer) for layer in layers]
        for number, layer in enumerate(self.compressed):
            layer.number = number
        super().__init__(layers=list(self._own))

    def _layer(self, layer: Any) -> CompressedLayer | SlidingLayer:
        if type(layer) is DynamicLayer:
            return CompressedLayer(self)
        if type(layer) is DynamicSlidingWindowLayer:
            return SlidingLayer(layer.sliding_window)
        raise ValueError(
            f"a layer of this model keeps its past in {type(layer).__name__}; only full and "
            "sliding-window attention are supported"
        )

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that the method holds."""
        return [layer for layer in self._own if isinstance(layer, CompressedLayer)]

    def belongs_to(self, model: PreTrainedModel) -> bool:
        """Whether `model` is the one that this cache was made for."""
        if self._owner is None:
            return self.config is model.config
        return self._owner() is model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that this cache holds to a file, from which `Attached.load` goes on.

        The file is a safetensors file with a checked header (kv-offload's `save_cache`): written
        whole or not at all, and tied to the model's weights, the method and its settings.

        Raises:
            ValueError: no whole prompt was seen, the model is gone, or the method's state cannot be
                stored; the text names what cannot.
            OSError: the file cannot be written.
        """
        model = None if self._owner is None else self._owner()
        if model is None:
            raise ValueError("the model that this cache was made for is gone: it cannot be saved")
        save(self, path, model)

    def expect(self, prompt_length: int | None) -> None:
        """`generate` is about to bring a prompt of so many tokens, if this cache is empty.

        None: it failed, and nobody knows what comes.
        """
        if self.tokens == 0:
            self._expected = prompt_length

    def _surprise(self) -> PromptSurprisal | None:
        """What will gather the prompt's surprisal, if the method needs it."""
        head = self.context.head if self.method.needs_surprisal else None
        return None if head is None else PromptSurprisal(head)

    def cut(self, new: int) -> int:
        """How many of the next `new` tokens must pass the model before the others do; 0 for all.

        A method that looks at the whole prompt first cannot answer tokens that come in one forward
        pass with the prompt's end, as a draft's do.
        """
        wanted = self.prompt_length or self._expected
        if self.surprise is None or self.prompt_complete or wanted is None:
            return 0
        return wanted - self.prompt_tokens if wanted - self.prompt_tokens < new else 0

    def enter(self, ids: Tensor, mask: Tensor | None) -> None:
        """Tokens [B, Q] are about to pass the model; `mask` [B, seen + Q], 0 for padding.

        The first `fresh` of them are of the prompt; `prompt_valid` and `valid` say which of these
        and of the others are no padding, None when all are.

        Raises:
            ValueError: an earlier forward ended in the middle, so layers hold unequal lengths; the
                number of rows is not that of the prompt; or `mask` is not of two dimensions.
        """
        layers = self.compressed
        lengths = {layer.seen for layer in layers}
        if self._passing is not None or (lengths and lengths != {self.tokens}):
            raise ValueError(
                f"a forward pass on this cache was interrupted: of {self.tokens} tokens its layers "
                f"hold {sorted(lengths)}; reset() it and start over"
            )
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask must be [B, T] with 0 for padding, got {shape}")
        batch, new = ids.shape
        if self._batch not in (0, batch):
            raise ValueError(
                f"input_ids has {batch} rows, but this cache holds a batch of {self._batch}; "
                "reset() it for a new prompt"
            )
        if self.recompress_after is not None:
            for layer in layers:
                layer.recompress()
        wanted = self.prompt_length or self._expected or self.prompt_tokens + new
        # the one time per forward pass that the host reads the mask
        padded = mask is not None and not bool(mask[:, -new:].all())
        valid = mask[:, -new:].bool() if mask is not None and padded else None
        self.fresh, self.prompt_valid = 0, None
        if not self.prompt_complete:
            self.fresh = min(new, wanted - self.prompt_tokens)
            self.prompt_valid = None if valid is None else valid[:, : self.fresh]
            self._prompt.append((ids[:, : self.fresh], self.prompt_valid))
            if self.prompt_tokens + self.fresh == wanted:
                self._begin()
            if self.surprise is not None:
                self._passing = ids[:, : self.fresh]
            self.prompt_tokens += self.fresh
        self.tokens += new
        if self.fresh < new:
            self.valid = None if valid is None else valid[:, self.fresh :]
            self._align()
            if self.valid is None:
                counts = [new - self.fresh] * batch
            else:
                counts = self.valid.sum(1).tolist()
            self.row_seen = [a + b for a, b in zip(self.row_seen, counts, strict=True)]
            rest = ids[:, self.fresh :] if self.fresh else ids
            self.plan.advance(
                rest if self.order is None else rest.gather(1, self.order), self.valid
            )

    def rope_tables(
        self, tables: RopeTables | None, turn: Turn, device: torch.device
    ) -> RopeTables:
        """`tables` of a layer, the tokens that are passing the model added once for all layers.

        None: it has none yet, and shares those of the first layer that was given the same.
        """
        if tables is None:
            tables = next((t for t in self.ropes if t.shared_by(turn, device, self.tokens)), None)
        if tables is None:
            tables = RopeTables(turn, device, grows=self.method.rope == "all")
            self.ropes.append(tables)
        if tables.seen == self.tokens:
            return tables
        tables.seen, batch, fresh = self.tokens, self._batch, self.fresh
        if fresh:
            prompt = turn.cos[:, :fresh], turn.sin[:, :fresh]
            tables.append(*prompt, self.prompt_valid, batch=batch)
        if tables.grows and fresh < turn.cos.shape[1]:
            cos, sin = (x[:, fresh:].expand(batch, -1, -1) for x in (turn.cos, turn.sin))
            if self.order is not None:
                cos, sin = (in_order(x[:, None], self.order)[:, 0] for x in (cos, sin))
            tables.append(cos, sin, self.valid, batch=batch)
        return tables

    def leave(self, hidden: Tensor) -> None:
        """The tokens have passed the decoder, whose last hidden states are `hidden` [B, Q, E].

        If they were the rest of a prompt whose surprisal the method needs, all layers compress.
        """
        if self.surprise is None or self._passing is None:
            return
        self.surprise.add(hidden, self._passing, self.prompt_valid)
        self._passing = None
        if self.prompt_complete:
            self.plan.finish(self.surprise.rows())
            self.surprise = None
            for layer in self.compressed:
                layer.finish()
            if all(layer.state is not None for layer in self.compressed):
                self.plan.compressed()

    @property
    def _batch(self) -> int:
        """Rows of the batch, 0 while nothing came."""
        return self._prompt[0][0].shape[0] if self._prompt else len(self.row_tokens)

    def _align(self) -> None:
        """Order in which the new tokens of every row have their padding on the left, if it is not.

        A later turn of a padded batch may follow a generated token: the padding is in the middle.
        """
        self.order = None
        if self.valid is not None and bool((self.valid[:, :-1] & ~self.valid[:, 1:]).any()):
            self.order = self.valid.int().argsort(dim=1, stable=True)
            self.valid = self.valid.gather(1, self.order)

    def _begin(self) -> None:
        """The prompt's ids are all known: strip the padding and let the method plan."""
        ids = torch.cat([part for part, _ in self._prompt], dim=1)
        parts = [torch.ones_like(i, dtype=torch.bool) if v is None else v for i, v in self._prompt]
        valid = torch.cat(parts, dim=1)
        rows = [row[keep] for row, keep in zip(ids, valid, strict=True)]
        first = valid.int().argmax(dim=1)
        try:
            if min(len(row) for row in rows) == 0:
                raise ValueError("attention_mask leaves a row of the prompt without any token")
            if any(not bool(v[f:].all()) for v, f in zip(valid, first, strict=True)):
                raise ValueError(
                    "attention_mask must have its zeros on the left: pad prompts there"
                )
            self.plan = self.method.begin(rows, self.context)
        except BaseException:
            self._prompt.pop()  # as if this forward pass had not been tried
            raise
        self.plan.settle(recompress=self.recompress_after is not None)
        self._prompt, self.prompt_complete = [], True
        self.row_tokens = [len(row) for row in rows]
        self.row_seen = list(self.row_tokens)

    def reset(self) -> None:
        """Forget everything: the cache is as new."""
        super().reset()
        self.plan, self.ropes, self.fresh, self._expected = Plan(), [], 0, None
        self.prompt_valid = self.valid = self.order = None
        self._prompt, self.row_tokens, self.row_seen = [], [], []
        self.surprise, self._passing = self._surprise(), None
        self.tokens, self.prompt_tokens, self.prompt_complete = 0, 0, False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self._own[layer_idx].get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, which came after the last compression."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, got {tokens_to_remove}")
        # Compressed layers may refuse, and do so before anything has changed.
        for layer in sorted(self._own, key=lambda layer: isinstance(layer, SlidingLayer)):
            layer.crop(tokens_to_remove)
        removed = min(-tokens_to_remove, self.tokens)
        self.tokens -= removed
        self.plan.crop(removed)
        for tables in self.ropes:
            tables.crop(removed)
        self.row_seen = [seen - removed for seen in self.row_seen]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._check_complete()
        super().batch_select_indices(indices)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._check_complete()
        super().batch_repeat_interleave(repeats)
        self._select(torch.arange(len(self.row_tokens)).repeat_interleave(repeats))

    def _check_complete(self) -> None:
        """Before any layer changes: those with a sliding window could, the others could not."""
        if self.tokens and not self.prompt_complete:
            raise ValueError("rows cannot be selected before the prompt is complete")

    def _select(self, rows: Tensor) -> None:
        self.plan.select_rows(rows)
        for tables in self.ropes:
            tables.select_rows(rows)
        order = rows.tolist()
        self.row_tokens = [self.row_tokens[row] for row in order]
        self.row_seen = [self.row_seen[row] for row in order]

    def report(self) -> Report:
        """What the cache holds now and what the next step attends."""
        layers = [self._layer_report(layer) for layer in self._own]
        held = [layer for layer in layers if layer.kind == "compressed"]
        hits = sum(layer.hits for layer in layers)
        asked = hits + sum(layer.misses for layer in layers)
        longest = max(self.row_tokens, default=0)

        def total(name: str) -> int:
            return sum(getattr(layer, name) for layer in layers)

        return Report(
            method=self.method.name,
            batch=len(self.row_tokens),
            prompt_tokens=longest,
            tokens_seen=max((layer.tokens_seen for layer in layers), default=0),
            budget_entries=budget_entries(self.method.budget, longest) if longest else 0,
            entries_attended=max((layer.entries_attended for layer in held), default=0),
            device_bytes=total("device_bytes") + self.plan.nbytes + self._own_bytes,
            host_bytes=total("host_bytes"),
            disk_bytes=total("disk_bytes"),
            full_kv_bytes=total("full_kv_bytes"),
            bytes_moved=total("bytes_moved"),
            hit_rate=hits / asked if asked else None,
            layers=layers,
        )

    @property
    def _own_bytes(self) -> int:
        """Bytes of token ids, masks and RoPE tables that the cache itself holds."""
        held = [x for part in self._prompt for x in part]
        held += [self.prompt_valid, self.valid, self.order, self._passing]
        own = storage_bytes(*(x for x in held if x is not None))
        if self.method.holds_rope:
            own += sum(tables.nbytes for tables in self.ropes)
        return own + (0 if self.surprise is None else self.surprise.nbytes)

    def _layer_report(self, layer: CompressedLayer | SlidingLayer) -> LayerReport:
        seen = layer.get_seq_length()
        if not isinstance(layer, CompressedLayer):
            tensors = [t for t in (layer.keys, layer.values) if t is not None]
            size = sum(t.untyped_storage().nbytes() for t in tensors)
            return LayerReport("sliding", seen, 0, size, 0, 0, size, 0, 0, 0)
        tiers = layer.nbytes()
        entries = 0 if layer.state is None else int(layer.state.entries().max())
        traffic, details = {"bytes_moved": 0, "hits": 0, "misses": 0}, {}
        if layer.state is not None:
            traffic, details = layer.state.traffic(), layer.state.details()
        return LayerReport(
            kind="compressed",
            tokens_seen=seen,
            entries_attended=entries,
            device_bytes=tiers["device"],
            host_bytes=tiers["host"],
            disk_bytes=tiers["disk"],
            full_kv_bytes=layer.token_bytes * seen * layer.batch_size,
            details=details,
            **traffic,
        )


def cache_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KVCache | None:
    """Our cache among a module's arguments; families name and order them differently."""
    usual = kwargs.get("past_key_values")
    if isinstance(usual, KVCache):
        return usual
    return next((x for x in (*kwargs.values(), *args) if isinstance(x, KVCache)), None)
