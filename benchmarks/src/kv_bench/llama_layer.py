"""One layer of Llama-3.1-8B's shape and random weights, to hold the cost of methods against."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from kv_bench.measure import milliseconds

HEADS, KV_HEADS, HEAD_SIZE, WIDTH = 32, 8, 128, 4096


def config() -> LlamaConfig:
    """meta-llama/Llama-3.1-8B, one layer of it."""
    shape: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": WIDTH,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
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
def prefill_ms(tokens: int, *, dtype: torch.dtype, device: str = "cpu", rounds: int = 1) -> float:
    """The whole layer over a prompt of `tokens`: projections, RoPE, attention, MLP; in ms."""
    shape = config()
    layer = LlamaDecoderLayer(shape, 0).to(device, dtype).eval()
    x = torch.randn(1, tokens, WIDTH, device=device, dtype=dtype)
    position = torch.arange(tokens, device=device)[None]
    tables = LlamaRotaryEmbedding(shape).to(device)(x, position)

    def call() -> object:
        return layer(x, position_embeddings=tables, position_ids=position)

    return milliseconds({"layer": call}, rounds=rounds, warm_up=0)["layer"]
