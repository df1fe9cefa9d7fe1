"""`kv-bench divergence`: how far a method's next-token distributions are from full KV's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kv_bench import measure
from kv_bench.answers import holds_every_layer
from kv_bench.options import check_counts
from kv_bench.shared import Shared
from kv_bench.sweep import settings
from kv_bench.tasks.base import ScoredText
from kv_bench.tasks.perplexity import Perplexity
from kv_bench.variants import make, make_variants, parse_lengths
from kv_integration import Attached, FullKV, Method, attach
from kv_integration.cli.inputs import check_positions, load_model, settle
from kv_integration.cli.progress import Steps


@click.command()
@click.option("--methods", multiple=True, required=True, help="Methods, with options or without.")
@click.option(
    "--vary",
    multiple=True,
    metavar="OPTION=VALUES",
    help="Values of an option with commas between, such as rank=8,16; may be given again.",
)
@click.option("--contexts", default="4096", show_default=True, help="Tokens, commas between.")
@click.option("--budgets", default="0.1", show_default=True, help="With commas between.")
@click.option("--samples", default=8, show_default=True, help="Passages per length.")
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Of a passage that come one by one; the first is predicted by the prompt, alike by all.",
)
@click.option("--seed", default=0, show_default=True, help="Of the passages.")
@measure.threads_option
@measure.json_option
def divergence(
    methods: tuple[str, ...],
    vary: tuple[str, ...],
    contexts: str,
    budgets: str,
    samples: int,
    tokens: int,
    seed: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """KL divergence from full KV's next-token distributions on held-out text, embedded model.

    The start of a passage is the prompt, which passes the model once for all settings; its end
    then comes token by token. `kl` is the mean over all tokens of KL(full KV || setting) in nats,
    `same` the share of tokens for which both find the same token likeliest. Lower perplexity than
    full KV's is not fidelity: this is.

    \b
    Examples:
      kv-bench divergence --methods shadowkv --vary rank=8,32,128
      kv-bench divergence --methods quest,loki --budgets 0.05,0.1,0.2
    """
    variants = make_variants(settings(methods, vary, product=False), budgets)
    lengths = parse_lengths(contexts)
    check_counts(samples=samples)
    settle(seed, threads, 1)
    loaded = load_model(None, dtype="auto", device="cpu")
    check_positions(loaded.model, max(lengths), 0)
    rows: list[dict[str, Any]] = []
    task = Perplexity(continuation=tokens)
    with Steps() as steps, steps.step("passages", len(lengths) * samples) as step:
        for length in lengths:
            found = []
            for text in task.texts(loaded.tokenizer, length=length, count=samples, seed=seed):
                ways = [make(variant) for variant in variants]
                found.append(compared(loaded.model, loaded.tokenizer, text, ways))
                step.advance()
            for variant, (kl, same) in zip(variants, torch.stack(found, 1).mean(1), strict=True):
                row = {"case": variant.method, "budget": variant.budget, "context": length}
                rows.append({**row, "kl": kl.item(), "same": same.item()})
    measure.publish(rows, json_file)


@torch.no_grad()
def compared(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: ScoredText,
    methods: Sequence[Method],
) -> Tensor:
    """float64[methods, 2]: mean KL(full KV || method) in nats, and how often both agree.

    The continuation has at least two tokens. The first is predicted by the prompt, and so by all
    alike; it is not compared.
    """
    with attach(model, tokenizer) as kv:
        if holds_every_layer(kv, methods[0]):
            full, *others = _predictions(kv, text, [FullKV(), *methods])
        else:
            full, *others = (_predictions(kv, text, [one])[0] for one in (FullKV(), *methods))
    kl = [(full.exp() * (full - other)).sum(-1).mean() for other in others]
    same = [(full.argmax(-1) == other.argmax(-1)).double().mean() for other in others]
    return torch.stack([torch.stack(kl), torch.stack(same)], 1)


def _predictions(kv: Attached, text: ScoredText, methods: Sequence[Method]) -> list[Tensor]:
    """Log-probabilities float64[n - 1, V] after each but the last of n tokens, by each method."""
    shared = Shared(methods)
    cache = kv.cache(shared, prompt_length=len(text.context_ids))
    kv.model(_ids(kv, text.context_ids), past_key_values=cache, logits_to_keep=1)
    found = []
    for index in range(len(methods)):
        shared.choose(index)
        logits = [
            kv.model(_ids(kv, [token]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
            for token in text.continuation_ids[:-1]
        ]
        found.append(torch.stack(logits).double().log_softmax(-1))
        if index + 1 < len(methods):
            cache.crop(len(text.context_ids) - cache.get_seq_length())
    return found


def _ids(kv: Attached, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)], device=kv.model.device)
