"""Windows of token ids, drawn from the texts to train on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kv_integration.router_training.settings import Training


class TextTooShortError(ValueError):
    """No text is long enough for the windows that training asks for."""


class Texts:
    """Token ids of the texts to train on, and windows of them.

    Args:
        tokenizer: the model's. Special tokens are encoded where texts spell them; none is added.
        texts: each a document of its own. A window comes from a text that is at least as long.

    Raises:
        TextTooShortError: no text has `longest` tokens.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], longest: int) -> None:
        self.ids = [
            torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
            for text in texts
        ]
        most = max((len(ids) for ids in self.ids), default=0)
        if most < longest:
            raise TextTooShortError(
                f"the longest of {len(self.ids)} texts has {most} tokens, too short to train on: "
                f"windows of {longest} tokens are wanted"
            )

    def window(self, length: int, rng: np.random.Generator) -> Tensor:
        """int64[length], from a text drawn among those that are long enough, anywhere in it."""
        enough = [ids for ids in self.ids if len(ids) >= length]
        ids = enough[rng.integers(len(enough))]
        start = int(rng.integers(len(ids) - length + 1))
        return ids[start : start + length]

    def digest(self) -> str:
        """SHA-256 of all token ids, to know the texts again."""
        digest = hashlib.sha256()
        for ids in self.ids:
            digest.update(f"{len(ids)}\n".encode() + ids.numpy().tobytes())
        return digest.hexdigest()


def draws(settings: Training, step: int, index: int) -> np.random.Generator:
    """The source of all chance for window `index` of `step`: nothing else is remembered."""
    return np.random.default_rng([settings.seed, step, index])
