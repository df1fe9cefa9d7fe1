"""Small random models of several families, prompts for them, and greedy generation."""

from __future__ import annotations

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama-mha": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_key_value_heads": 4})),
    "llama-mqa": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_key_value_heads": 1})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        )
    ),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1])),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A random model, the same at every call, with attention sharp enough to tell tokens apart."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and ("q_proj" in name or "k_proj" in name):
                weight.mul_(4.0)
    return model.to(dtype)


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


def generate(model, inputs, cache=None, *, new: int = 6, **options):
    """Greedy tokens [B, T + new] and the scores of each step [new, B, V]."""
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
