"""A model folder for tests: a byte-level BPE of a few hundred entries and a random tiny Llama."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kv_integration import haystack

POSITIONS = 4096
TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(*, template: bool = True) -> PreTrainedTokenizerFast:
    """Trained on a page of the language reference and the words of a needle."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|eos|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    page = haystack.topics(held_out=False)[0]
    inner.train_from_iterator([page, haystack.NEEDLE, haystack.QUESTION], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|eos|>", pad_token="<|eos|>", padding_side="left"
    )
    if template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(vocabulary: int, *, positions: int = POSITIONS) -> LlamaForCausalLM:
    """Two layers, two KV heads under four query heads, weights from a fixed seed."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=positions,
            eos_token_id=0,
            bos_token_id=None,
        )
    ).eval()


def make_folder(folder: Path, *, positions: int = POSITIONS) -> Path:
    """Save model, tokenizer and keys as `from_pretrained` and the commands want them."""
    tokenizer = make_tokenizer()
    make_model(len(tokenizer), positions=positions).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "keys.json").write_text(json.dumps(["garden", "river", "market"]))
    return folder
