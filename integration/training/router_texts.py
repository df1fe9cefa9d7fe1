"""Write the texts that the embedded model's router is trained on.

Prose of the training part with facts between its sentences and questions about them, as in the
embedded model's own training: plain prose alone holds almost no far attention for a model whose one
skill is to look up a fact. No held-out topic and no held-out pair of key and number is in them.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import corpus
import numpy as np
from tasks import Sampler
from transformers import AutoTokenizer

from kv_integration import haystack
from kv_integration.embedded import model_path

EPISODES = (512, 768, 1024, 1536)  # tokens from a conversation's first word to its last answer
FACTS = (
    4,
    16,
)  # of a conversation, and as many questions: each is an event that a router learns from


def streams(tokenizer) -> list[np.ndarray]:
    """Token ids of the libraries' docstrings and of the training topics."""
    both = corpus.library_texts(), haystack.topics(held_out=False)
    encoded = [tokenizer([t + "\n\n" for t in texts], add_special_tokens=False) for texts in both]
    return [np.concatenate([np.array(ids) for ids in each["input_ids"]]) for each in encoded]


def document(sampler: Sampler, tokens: int) -> list[int]:
    """Conversations one after another, at least `tokens` tokens in all."""
    ids: list[int] = []
    while len(ids) < tokens:
        length = int(sampler.rng.choice(EPISODES))
        facts = int(sampler.rng.integers(FACTS[0], FACTS[1] + 1))
        ids += sampler.document(length, facts, facts).ids.tolist()
    return ids


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the texts.")
@click.option("--documents", default=64, show_default=True)
@click.option("--tokens", default=8192, show_default=True, help="Of each document, at least.")
@click.option("--seed", default=1, show_default=True)
def main(out: Path, documents: int, tokens: int, seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    keys = json.loads((model_path() / "keys.json").read_text())
    sampler = Sampler(tokenizer, streams(tokenizer), [0.7, 0.3], keys, seed)
    out.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        text = tokenizer.decode(document(sampler, tokens))
        (out / f"text-{number:03d}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
