"""Tokenizers of different kinds: with and without a chat template, with BOS, of bytes."""

from __future__ import annotations

from functools import cache

from small_model import make_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from kv_integration.embedded import model_path

KINDS = ("embedded", "template", "bos", "bytes")


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    if kind == "embedded":
        return AutoTokenizer.from_pretrained(model_path())
    if kind == "bytes":
        return ByT5Tokenizer()
    tokenizer = make_tokenizer(template=kind == "template")
    if kind == "bos":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", 1)]
        )
    return tokenizer
