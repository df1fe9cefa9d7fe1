"""Small random models of many families, prompts for them, and greedy generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB = 96
POSITIONS = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
HEAD_DIM = ("head_dim", "num_key_value_heads")
LOCAL_GLOBAL = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def llama(**more: Any) -> Callable[[], PreTrainedModel]:
    return lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | more))


def rope(kind: str, **more: Any) -> Callable[[], PreTrainedModel]:
    """A Llama whose RoPE is scaled from 32 positions, which the tests' prompts exceed."""
    return llama(
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            **more,
        },
        max_position_embeddings=32 if kind == "dynamic" else POSITIONS,
    )


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in SHAPE.items() if name not in names}


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama(),
    "llama-mha": llama(num_key_value_heads=4),
    "llama-mqa": llama(num_key_value_heads=1),
    "llama-bias": llama(attention_bias=True),
    "llama3-rope": rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": rope("yarn"),
    "dynamic": rope("dynamic"),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **LOCAL_GLOBAL)),
    "phi3-longrope": lambda: Phi3ForCausalLM(
        Phi3Config(
            **without("head_dim"),
            original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + i for i in range(8)],
            },
        )
    ),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**SHAPE, partial_rotary_factor=0.5)),
    "cohere2": lambda: Cohere2ForCausalLM(Cohere2Config(**SHAPE, **LOCAL_GLOBAL, logit_scale=1.0)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SHAPE)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1])),
    "gpt-neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**without(*HEAD_DIM), rotary_pct=0.25, use_parallel_residual=True)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "gpt-bigcode": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**GPT2, multi_query=True)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4)),
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
# Families whose positions are embedded, not turned into the keys.
ROPELESS = ("gpt2", "gpt-bigcode")
# Families whose RoPE depends on the longest row of a batch, by transformers' own definition.
BY_LENGTH = ("dynamic", "phi3-longrope")


def build(family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> PreTrainedModel:
    """A random model, the same at every call, with attention sharp enough to tell tokens apart."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and not any(x in name for x in ("embed", "wte", "wpe")):
                weight.mul_(4.0)
    return model.to(dtype)


@cache
def shared(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """`build`, made once for all tests; they must leave it as they found it."""
    return build(family, dtype)


def prompt(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts, left-padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), 1)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(2, VOCAB, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def full_kv(model: PreTrainedModel) -> DynamicCache:
    """transformers' own cache."""
    return DynamicCache(config=model.config)


def forget_lengths(model: PreTrainedModel) -> None:
    """Dynamic RoPE remembers on the model how long prompts were; start as a new model does."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq = module.original_inv_freq
            module.max_seq_len_cached = module.original_max_seq_len


def generate(model, inputs, cache=None, *, new: int = 6, **options):
    """Greedy tokens [B, T + new] and the scores of each step [new, B, V]."""
    forget_lengths(model)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)
