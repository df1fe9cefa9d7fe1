"""`rotate` against the embeddings of transformers, the models' own code computing both tables
and the rotation."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from common import normal
from hypothesis import given
from hypothesis import strategies as st

from kv_lowrank import rotate, unrotate

SIZE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 32,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
LONG = [1.0 + i / 4 for i in range(8)]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: model, its rope parameters, what `rotate` needs to be told
    "llama": ("Llama", {"rope_type": "default", "rope_theta": 1e4}, {}),
    "llama3": (
        "Llama",
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {},
    ),
    "linear": ("Llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, {}),
    "yarn": (
        "Llama",
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {},
    ),
    "dynamic": ("Llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, {}),
    "longrope": (
        "Phi3",
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": LONG,
            "original_max_position_embeddings": 16,
        },
        {},
    ),
    "phi": ("Phi", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, {}),
    "glm": (
        "Glm",
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"layout": "interleaved", "table": "half"},
    ),
    "cohere": (
        "Cohere",
        {"rope_type": "default", "rope_theta": 1e4},
        {"layout": "interleaved"},
    ),
    "ernie4_5": (
        "Ernie4_5",
        {"rope_type": "default", "rope_theta": 1e4},
        {"layout": "interleaved", "table": "half"},
    ),
    "gpt_oss": (
        "GptOss",
        {"rope_type": "default", "rope_theta": 1e4},
        {"table": "single"},
    ),
}


def embedding(name: str) -> tuple[Any, Any]:
    """The model's rotary embedding and its `apply_rotary_pos_emb`."""
    model, parameters, _ = CASES[name]
    folder = "gpt_oss" if name == "gpt_oss" else model.lower()
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config_type = getattr(importlib.import_module("transformers"), f"{model}Config")
    size = dict(SIZE)
    if name == "longrope":  # Phi3 takes the trained length from the configuration itself
        size["original_max_position_embeddings"] = 16
    config = config_type(**size, head_dim=16, rope_parameters=dict(parameters))
    return getattr(module, f"{model}RotaryEmbedding")(config), module.apply_rotary_pos_emb


@pytest.mark.parametrize("name", CASES)
@given(
    seed=st.integers(0, 999),
    batch=st.integers(1, 2),
    tokens=st.integers(1, 8),
    start=st.integers(0, 100),
)
def test_rotate_equals_apply_rotary_pos_emb(name, seed, batch, tokens, start):
    rotary, apply = embedding(name)
    options = CASES[name][2]
    query = normal(seed, batch, 4, tokens, 16)
    key = normal(seed + 1, batch, 2, tokens, 16)
    # Left padding: the rows of a batch stand at other positions.
    positions = start + torch.arange(tokens) + 3 * torch.arange(batch)[:, None]
    cos, sin = rotary(query, positions)
    width = cos.shape[-1] * (2 if options.get("table") == "single" else 1)
    if name == "phi":  # its attention cuts the channels before it calls
        wanted = [
            torch.cat((part, rest), -1)
            for part, rest in zip(
                apply(query[..., :width], key[..., :width], cos, sin),
                (query[..., width:], key[..., width:]),
                strict=True,
            )
        ]
    else:
        wanted = apply(query, key, cos, sin)
    for x, want in zip((query, key), wanted, strict=True):
        got = rotate(x, cos, sin, **options)
        assert torch.equal(got, want)
        torch.testing.assert_close(unrotate(want, cos, sin, **options), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_scaled_tables_are_really_scaled(name):
    rotary, _ = embedding(name)
    cos, sin = rotary(torch.zeros(1, 1, 1, 16), torch.arange(40)[None])
    assert (cos.square() + sin.square() - 1).abs().max() > 0.1


@pytest.mark.parametrize("name", ["phi", "glm"])
def test_partial_tables_are_really_partial(name):
    rotary, _ = embedding(name)
    cos, _ = rotary(torch.zeros(1, 1, 1, 16), torch.arange(4)[None])
    assert cos.shape[-1] == 8
