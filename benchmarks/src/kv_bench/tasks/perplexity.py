"""Perplexity of book-length text, as the papers measure it on PG-19 (Rae et al. 2020): the context
passes the model at once, then the continuation token by token through the cache."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_bench.tasks.base import MissingData, PerplexityTask, ScoredText, check_counts
from kv_bench.tasks.data import Source, read_rows
from kv_bench.tasks.prompt import prefix_ids
from kv_bench.tasks.prose import prose

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB = "emozilla/pg19-test"
SOURCE = Source(
    part="test",
    hub=HUB,
    published={"path": HUB, "split": "test"},
    mirror={"split": "test"},
    fields=("text",),
    page=f"https://huggingface.co/datasets/{HUB}, books of PG-19",
)


@dataclass(frozen=True)
class Perplexity(PerplexityTask):
    """Passages drawn from texts, each of `length` tokens; the last `continuation` are scored."""

    name: str = "perplexity"
    continuation: int = 256
    metric: str = "perplexity"

    def texts(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int | None = None,
        count: int | None = None,
        seed: int = 0,
        data: str | Path | None = None,
        text: str | None = None,
    ) -> Sequence[ScoredText]:
        """Passages of `length` tokens (4,096), the tokenizer's first special tokens included.

        Args:
            count: passages (8).
            seed: draws text and place.
            data: a text file, a folder of .txt files, a JSON Lines file with "text", or a hub id
                of such rows; "pg19" for the test books of PG-19. None: `text`.
            text: None for the held-out topics of the language reference.

        Raises:
            ValueError: `length` leaves no token of context, no text is that long, or both `data`
                and `text` are given.
            MissingData: `data` is not there.
        """
        check_counts(length, count)
        if data is not None and text is not None:
            raise ValueError(f"{self.name} takes data or text, not both")
        tokens, passages = length or 4096, count or 8
        start = prefix_ids(tokenizer)
        wanted = tokens - len(start)
        context = wanted - self.continuation
        if context < 1:
            raise ValueError(
                f"length must be above {self.continuation + len(start)} tokens, of which the last "
                f"{self.continuation} are scored, got {tokens}"
            )
        bodies = [prose(text)] if data is None else read_texts(data, task=self.name)
        encoded = [tokenizer(body, add_special_tokens=False)["input_ids"] for body in bodies]
        long = [at for at, ids in enumerate(encoded) if len(ids) >= wanted]
        if not long:
            longest = max(map(len, encoded))
            raise ValueError(f"length is {tokens} tokens, but the longest text has {longest}")
        drawn = []
        for index in range(passages):
            rng = random.Random(f"{self.name}:{tokens}:{seed}:{index}")
            which = rng.choice(long)
            at = rng.randint(0, len(encoded[which]) - wanted)
            passage = encoded[which][at : at + wanted]
            drawn.append(
                ScoredText(
                    id=str(index),
                    context_ids=(*start, *passage[:context]),
                    continuation_ids=tuple(passage[context:]),
                    extra={"length": tokens, "text": which, "start": at},
                )
            )
        return drawn


def read_texts(data: str | Path, *, task: str) -> list[str]:
    """Texts of a file, of a folder's .txt files in the order of their names, or of the hub."""
    path = Path(data)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise MissingData(f"{task}: {path} has no .txt file")
        return [file.read_text(encoding="utf-8") for file in files]
    if path.is_file() and path.suffix != ".jsonl":
        return [path.read_text(encoding="utf-8")]
    rows = read_rows(None if data == "pg19" else data, SOURCE, task=task)
    return [str(row["text"]) for row in rows]


@torch.no_grad()
def negative_log_likelihoods(
    model: PreTrainedModel,
    text: ScoredText,
    cache: Any,
    *,
    on_token: Callable[[], object] | None = None,
) -> Tensor:
    """-log p of each token of the continuation given all before it, in nats: float64[N].

    The context passes the model in one call, which is where a method compresses it, then the
    continuation in calls of one token each, the last of which is only predicted.

    Args:
        cache: an empty cache for the model, of transformers or of `kv_integration` (made with
            `prompt_length=len(text.context_ids)`).
        on_token: called after each token, for progress.
    """
    context = torch.tensor([text.context_ids], device=model.device)
    continuation = torch.tensor([text.continuation_ids], device=model.device)
    count = continuation.shape[1]
    losses = torch.empty(count, dtype=torch.float64, device=model.device)
    ids = context
    for at in range(count):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        scores = logits[0, -1].double().log_softmax(-1)
        losses[at] = -scores[continuation[0, at]]
        ids = continuation[:, at : at + 1]
        if on_token is not None:
            on_token()
    return losses.cpu()


def perplexity(losses: Sequence[Tensor]) -> float:
    """exp of the mean over all tokens of all texts; each text's losses as above.

    Raises:
        ValueError: there is no token.
    """
    count = sum(one.numel() for one in losses)
    if count == 0:
        raise ValueError("losses must hold at least one token")
    return math.exp(math.fsum(float(one.sum()) for one in losses) / count)
