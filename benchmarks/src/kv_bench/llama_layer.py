"""One layer of a known model's shape and random weights, to hold the cost of methods against.

That of Llama-3.1-8B unless told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from kv_bench.measure import milliseconds

HEADS, KV_HEADS, HEAD_SIZE, WIDTH = 32, 8, 128, 4096


def llama_8b() -> LlamaConfig:
    """meta-llama/Llama-3.1-8B."""
    shape: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": WIDTH,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**shape)


def qwen_14b() -> Qwen2Config:
    """Qwen/Qwen2.5-14B-Instruct."""
    shape: dict[str, Any] = {
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    return Qwen2Config(**shape)


@dataclass(frozen=True)
class Shape:
    """A model: its configuration, and the classes that its layers are of."""

    config: Callable[[], PreTrainedConfig]
    layer: Callable[..., nn.Module]
    rotary: Callable[..., nn.Module]

    @property
    def layers(self) -> int:
        return int(self.config().num_hidden_layers)

    @property
    def heads(self) -> int:
        return int(self.config().num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(self.config().num_key_value_heads)

    @property
    def head_size(self) -> int:
        own = self.config()
        return int(getattr(own, "head_dim", None) or own.hidden_size // self.heads)

    def parameters(self) -> int:
        """Numbers in the weights of the whole model, counted without making them."""
        return _parameters(self.config)


@cache
def _parameters(config: Callable[[], PreTrainedConfig]) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    return sum(weight.numel() for weight in model.parameters())


LLAMA_8B = Shape(llama_8b, LlamaDecoderLayer, LlamaRotaryEmbedding)
QWEN_14B = Shape(qwen_14b, Qwen2DecoderLayer, Qwen2RotaryEmbedding)
SHAPES = {"llama-8b": LLAMA_8B, "qwen-14b": QWEN_14B}


def attention_ms(tokens: int, *, dtype: torch.dtype, device: str = "cpu", rounds: int = 1) -> float:
    """Causal attention of a prompt of `tokens` alone, by torch's own kernel, in ms."""
    q = torch.randn(1, HEADS, tokens, HEAD_SIZE, device=device, dtype=dtype)
    k, v = torch.randn(2, 1, KV_HEADS, tokens, HEAD_SIZE, device=device, dtype=dtype)

    def call() -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )

    return milliseconds({"attention": call}, rounds=rounds, warm_up=0)["attention"]


@torch.inference_mode()
def prefill_ms(
    tokens: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    rounds: int = 1,
    shape: Shape = LLAMA_8B,
) -> float:
    """The whole layer over a prompt of `tokens`: projections, RoPE, attention, MLP; in ms."""
    config = shape.config()
    layer = shape.layer(config, 0).to(device, dtype).eval()
    x = torch.randn(1, tokens, config.hidden_size, device=device, dtype=dtype)
    position = torch.arange(tokens, device=device)[None]
    tables = shape.rotary(config).to(device)(x, position)

    def call() -> object:
        return layer(x, position_embeddings=tables, position_ids=position)

    return milliseconds({"layer": call}, rounds=rounds, warm_up=0)["layer"]
