"""Hypothesis profiles, and a tokenizer with real delimiters."""

from __future__ import annotations

import os

import pytest
from families import VOCAB
from hypothesis import settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

settings.register_profile(
    "default", max_examples=200, deadline=None, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1, ... with every eighth entry a delimiter."""
    ends = [".", "?", "!", ",", ";", ":"]
    words = ["<bos>", "<pad>"]
    for index in range(2, VOCAB):
        words.append(ends[index // 8 % 6] * (1 + index // 48) if index % 8 == 0 else f"w{index}")
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", pad_token="<pad>")
