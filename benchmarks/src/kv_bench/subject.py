"""What efficiency is measured on: the embedded model or random weights of a shape; real text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
)

from kv_integration import haystack
from kv_integration.cli.inputs import Loaded, load_model
from kv_integration.embedded import model_path

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {  # meta-llama/Llama-3.2-1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "wide-kv": {  # keys and values outweigh everything else that a prefill holds
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def load(shape: str, *, layers: int | None, dtype: torch.dtype) -> Loaded:
    """The embedded model, or one with random weights; the tokenizer is the embedded one's.

    layers: fewer than the shape has, for a shorter run; None for all.
    """
    if shape == "embedded":
        loaded = load_model(None, dtype=str(dtype).removeprefix("torch."), device="cpu")
        return loaded
    return random_model(config_of(shape), layers=layers, dtype=dtype)


def config_of(shape: str) -> PreTrainedConfig:
    """The configuration of a known shape."""
    return LlamaConfig(
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        eos_token_id=None,
        **SHAPES[shape],
    )


def read_config(file: Path) -> PreTrainedConfig:
    """The configuration in a `config.json` of transformers.

    Raises:
        ValueError: there is no such file, or it is none of a known model.
    """
    if not file.is_file():
        raise ValueError(f"there is no config {file}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(file)
    except Exception as error:  # what a foreign file raises depends on what is in it
        raise ValueError(f"{file} is no config of a model: {error}") from error
    return config


def random_model(
    config: PreTrainedConfig, *, layers: int | None, dtype: torch.dtype, device: str = "cpu"
) -> Loaded:
    """A model of `config` with random weights and the embedded model's vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    torch.manual_seed(0)
    text = config.get_text_config(decoder=True)
    text.vocab_size = len(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(text, name, None)
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model = make(config, dtype=dtype)
    return Loaded(model.eval(), tokenizer, model_path())


def prose(loaded: Loaded, tokens: int) -> torch.Tensor:
    """int64[1, tokens] of real prose, from the start again where it is too short."""
    text = "\n\n".join(haystack.topics(held_out=True))
    ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False).input_ids)
    return ids.repeat(-(-tokens // len(ids)))[:tokens][None]
