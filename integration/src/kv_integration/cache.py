"""The cache that stock `generate()` runs on: a prompt compressed by a method, then what follows."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kv_integration.budget import budget_entries
from kv_integration.layer import CompressedLayer
from kv_integration.method import Context, Method, Plan
from kv_integration.report import LayerReport, Report


class KVCache(Cache):
    """One conversation's keys and values, held by `method`. Make it with `Attached.cache`.

    Layers with full attention are compressed; layers with a sliding window stay as transformers
    makes them. All state is here: several caches on one model do not touch each other.

    Args:
        config: of the model.
        method: how the prompt is held.
        context: the model's surroundings (tokenizer).
        prompt_length: tokens of a prompt that comes in several forwards (chunked prefill, as
            `generate(prefill_chunk_size=...)` does): compression waits for the last. None: the
            first forward is the whole prompt.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: Method,
        context: Context,
        *,
        prompt_length: int | None = None,
    ) -> None:
        if not isinstance(method, Method):
            raise TypeError(f"method must be a kv_integration method, got {method!r}")
        if prompt_length is not None and prompt_length < 1:
            raise ValueError(f"prompt_length must be at least 1, got {prompt_length}")
        self.method, self.context, self.prompt_length = method, context, prompt_length
        self.plan = Plan()
        self.valid: Tensor | None = None
        self.order: Tensor | None = None
        self._prompt: list[tuple[Tensor, Tensor | None]] = []
        self.row_tokens: list[int] = []
        self.tokens = 0
        self.prompt_tokens = 0
        self.prompt_complete = False
        layers = DynamicCache(config=config).layers
        self._own = [self._layer(layer) for layer in layers]
        super().__init__(layers=list(self._own))

    def _layer(self, layer: object) -> CompressedLayer | DynamicSlidingWindowLayer:
        if type(layer) is DynamicLayer:
            return CompressedLayer(self)
        if type(layer) is DynamicSlidingWindowLayer:
            return layer
        raise ValueError(
            f"a layer of this model keeps its past in {type(layer).__name__}; only full and "
            "sliding-window attention are supported"
        )

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that the method holds."""
        return [layer for layer in self._own if isinstance(layer, CompressedLayer)]

    def enter(self, ids: Tensor, mask: Tensor | None) -> None:
        """Tokens [B, Q] are about to pass the model; `mask` [B, seen + Q], 0 for padding.

        Raises:
            ValueError: an earlier forward ended in the middle, so layers hold unequal lengths; more
                tokens came than the prompt was said to have; or `mask` is not of two dimensions.
        """
        lengths = {layer.seen for layer in self.compressed}
        if lengths and lengths != {self.tokens}:
            raise ValueError(
                f"a forward pass on this cache was interrupted: of {self.tokens} tokens its layers "
                f"hold {sorted(lengths)}; reset() it and start over"
            )
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask must be [B, T] with 0 for padding, got {shape}")
        new = ids.shape[1]
        wanted = self.prompt_length or self.prompt_tokens + new
        if not self.prompt_complete and self.prompt_tokens + new > wanted:
            raise ValueError(
                f"prompt_length is {wanted}, but {self.prompt_tokens + new} tokens came before it "
                "was met"
            )
        self.tokens += new
        valid = None if mask is None else mask[:, -new:].bool()
        self.valid = None if valid is None or bool(valid.all()) else valid
        if self.prompt_complete:
            self._align()
            self.plan.advance(ids if self.order is None else ids.gather(1, self.order), self.valid)
            return
        self._prompt.append((ids, self.valid))
        self.prompt_tokens += new
        if self.prompt_tokens == wanted:
            self._begin()

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
        self.row_tokens = [len(row) for row in rows]
        if min(self.row_tokens) == 0:
            raise ValueError("attention_mask leaves a row of the prompt without any token")
        first = valid.int().argmax(dim=1)
        if any(not bool(v[f:].all()) for v, f in zip(valid, first, strict=True)):
            raise ValueError("attention_mask must have its zeros on the left: pad prompts there")
        self._prompt = []
        self.plan = self.method.begin(rows, self.context)
        self.prompt_complete = True

    def reset(self) -> None:
        """Forget everything: the cache is as new."""
        super().reset()
        self.plan, self.valid, self.order = Plan(), None, None
        self._prompt, self.row_tokens = [], []
        self.tokens, self.prompt_tokens, self.prompt_complete = 0, 0, False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self._own[layer_idx].get_seq_length()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._select(torch.arange(len(self.row_tokens)).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        self.plan.select_rows(rows)
        self.row_tokens = [self.row_tokens[row] for row in rows.tolist()]

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
            device_bytes=total("device_bytes") + self.plan.nbytes,
            host_bytes=total("host_bytes"),
            disk_bytes=total("disk_bytes"),
            full_kv_bytes=total("full_kv_bytes"),
            bytes_moved=total("bytes_moved"),
            hit_rate=hits / asked if asked else None,
            layers=layers,
        )

    def _layer_report(self, layer: CompressedLayer | DynamicSlidingWindowLayer) -> LayerReport:
        seen = layer.get_seq_length()
        if not isinstance(layer, CompressedLayer):
            tensors = [t for t in (layer.keys, layer.values) if t is not None]
            size = sum(t.untyped_storage().nbytes() for t in tensors)
            return LayerReport("sliding", seen, 0, size, 0, 0, size, 0, 0, 0)
        tiers = layer.nbytes()
        entries = 0 if layer.state is None else int(layer.state.entries().max())
        traffic = {"bytes_moved": 0, "hits": 0, "misses": 0}
        if layer.state is not None:
            traffic = layer.state.traffic()
        return LayerReport(
            kind="compressed",
            tokens_seen=seen,
            entries_attended=entries,
            device_bytes=tiers["device"],
            host_bytes=tiers["host"],
            disk_bytes=tiers["disk"],
            full_kv_bytes=layer.token_bytes * seen * layer.batch_size,
            **traffic,
        )
