"""The frozen model's forward passes: a whole text, recorded, and single rows of it, rerun.

A row is one query position. In a rerun every layer attends, from the row's own hidden state, to the
recorded keys and values of the tokens before it and to its own: a decoding step from an exact
prompt, many at a time. What the layer makes of the recorded ones is up to the `attend` it is given,
so teacher and student differ in that function alone, and only the rows take a second forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kv_integration.attach import NOT_HONOURED, PREFIX, check_supported
from kv_integration.surprise import LMHead


class Call(NamedTuple):
    """What a layer asks of its attention: q [1, H_q, N, D], k and v [1, H_kv, N, D]."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    sliding: int | None


Attend = Callable[[Call], Tensor]
_recording: ContextVar[Recording | None] = ContextVar("kv_integration_recording", default=None)
_rows: ContextVar[Attend | None] = ContextVar("kv_integration_rows", default=None)


@dataclass
class Recording:
    """One text as the frozen model sees it.

    ids: int64[T]. surprisal: float32[T]. keys, values: [H_kv, T, D] of every layer, the keys after
    RoPE. numbers: of the layers with full attention, by the model's own numbers.
    """

    ids: Tensor
    numbers: dict[int, int]
    surprisal: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def taken_over(model: PreTrainedModel) -> Iterator[None]:
    """Let `record` and `rerun` reach the model's attention; afterwards it is as it was.

    Raises:
        ValueError: its attention is of a kind that our caches do not hold, or it is attached.
    """
    check_supported(model)
    original = model.config._attn_implementation
    model.set_attn_implementation(_register(original))
    try:
        yield
    finally:
        model.set_attn_implementation(original)


@torch.no_grad()
def record(model: PreTrainedModel, ids: Tensor) -> Recording:
    """Run a text, int64[T], through the model; no logits are held but a slice at a time.

    Raises:
        ValueError: the model has no LM head.
    """
    head = LMHead.of(model)
    if head is None:
        raise ValueError(f"{type(model).__name__} has no LM head, so its texts have no surprisal")
    layers = DynamicCache(config=model.config).layers
    full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    recording = Recording(ids, {index: number for number, index in enumerate(full)})
    token = _recording.set(recording)
    try:
        hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state
    finally:
        _recording.reset(token)
    every = torch.ones_like(ids, dtype=torch.bool)[None]
    recording.surprisal = head.surprisal(hidden, ids[None], every)[0]
    return recording


def rerun(model: PreTrainedModel, recording: Recording, rows: Tensor, attend: Attend) -> Tensor:
    """Logits float32[N, V] at positions `rows` int64[N], with `attend` in place of attention."""
    # The last position comes along: RoPE that depends on the length must rotate as it did before.
    every = torch.cat((rows, rows.new_tensor([len(recording.ids) - 1])))[None]
    token = _rows.set(attend)
    try:
        out = model(input_ids=recording.ids[every], position_ids=every, use_cache=False)
    finally:
        _rows.reset(token)
    return out.logits[0, :-1].float()


def _register(original: str) -> str:
    """Register the attention and mask functions that stand in for `original`'s."""
    name = f"{PREFIX}training_{original}"
    original_mask = ALL_MASK_ATTENTION_FUNCTIONS[original]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        recording, attend = _recording.get(), _rows.get()
        number = int(module.layer_idx)  # type: ignore[arg-type]
        if attend is not None:
            for option in NOT_HONOURED:
                if options.get(option) is not None:
                    raise ValueError(f"{type(module).__name__} asks its attention for {option!r}")
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            one_less = slice(None, -1)  # the last row came for RoPE alone
            call = Call(
                number,
                query[:, :, one_less],
                key[:, :, one_less],
                value[:, :, one_less],
                scale,
                options.get("sliding_window"),
            )
            with torch.autocast(query.device.type, enabled=False):
                out = nn.functional.pad(attend(call), (0, 0, 0, 1))
            return out.to(query.dtype).transpose(1, 2), None
        if recording is not None:
            recording.keys[number], recording.values[number] = key[0], value[0]
        # "eager" is not registered: every modeling file has its own.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        run = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        return run(module, query, key, value, attention_mask, **options)

    def mask(*args: Any, **options: Any) -> Any:
        return None if _rows.get() is not None else original_mask(*args, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name
