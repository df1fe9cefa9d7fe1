"""Where a model's layers are: its decoder, and the attention modules in it."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The stack of layers, without the LM head."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def attention_modules(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's self-attention modules, in the order of its layers."""
    return [
        module
        for module in decoder.modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    ]
