"""Perplexity of the embedded model on the topics that it has not read.

python perplexity.py ../src/kv_integration/embedded/model --context 1024
"""

from __future__ import annotations

import math
from pathlib import Path

import click
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv_integration import haystack


@click.command(help=__doc__.split("\n")[0])
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--context", default=1024, show_default=True, help="Tokens of one window.")
def main(folder: Path, context: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(haystack.topics(held_out=True))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // context * context].view(-1, context)
    nats = 0.0
    with torch.no_grad():
        for window in windows:
            logits = model(window[None]).logits[0, :-1]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    tokens = windows.numel() - len(windows)
    letters = len(tokenizer.decode(windows.flatten()))
    click.echo(
        f"{tokens} tokens in windows of {context}: perplexity {math.exp(nats / tokens):.1f}, "
        f"{nats / math.log(2) / letters:.2f} bits per character"
    )


if __name__ == "__main__":
    main()
