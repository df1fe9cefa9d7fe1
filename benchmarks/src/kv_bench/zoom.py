"""`kv-bench zoom`: how often each query head expands spans of a prompt that holds a needle."""

from __future__ import annotations

import itertools
from pathlib import Path

import click
import torch
from torch import Tensor

from kv_bench import measure
from kv_bench.answers import Generator, left_padded
from kv_bench.niah import make_prompts, places_of
from kv_bench.options import check_counts, model_option
from kv_bench.variants import method_named, parse_lengths
from kv_integration import Attached, Method, attach
from kv_integration.answer import end_tokens, pad_token
from kv_integration.cli.files import check_writable, whole_file
from kv_integration.cli.inputs import (
    Loaded,
    check_positions,
    load_model,
    parse_budget,
    settle,
)
from kv_integration.cli.progress import Steps


@click.command()
@click.option("--method", "name", default="sekv(router=embedded)", show_default=True)
@click.option("--budget", default="0.1", show_default=True, help="Entries or share of the prompt.")
@click.option(
    "--contexts", default="2048", show_default=True, help="Prompt lengths, commas between."
)
@click.option("--depths", default=5, show_default=True, help="Places of the needle.")
@click.option("--samples", default=4, show_default=True, help="Prompts per length and depth.")
@click.option("--batch", default=4, show_default=True, help="Prompts that run together.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@model_option
@click.option("--max-new-tokens", default=4, show_default=True, help="Tokens per answer.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.png",
    help="Draw the rates there, a row per layer and a column per query head.",
)
@measure.threads_option
@measure.json_option
def zoom(
    name: str,
    budget: str,
    contexts: str,
    depths: int,
    samples: int,
    batch: int,
    seed: int,
    folder: Path | None,
    max_new_tokens: int,
    plot: Path | None,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Zoom-in rates by layer and query head (SeKV, Figure 5).

    The share of a prompt's spans that a query head makes its KV head expand, while the question
    for a needle is answered; the mean over all prompts.

    \b
    Example:
      kv-bench zoom --contexts 2048,4096 --json zoom.json --plot zoom.png
    """
    lengths, granted = parse_lengths(contexts), parse_budget(budget)
    check_counts(depths=depths, samples=samples, batch=batch)
    if plot is not None:
        check_writable("--plot", plot, suffixes=(".png",))
    method = method_named(name, granted)
    settle(seed, threads, max_new_tokens)
    loaded = load_model(folder, dtype="auto", device="cpu")
    check_positions(loaded.model, max(lengths), max_new_tokens)
    found: list[Tensor] = []
    places = list(itertools.product(lengths, places_of(depths)))
    with (
        attach(loaded.model, loaded.tokenizer) as kv,
        Steps() as steps,
        steps.step("needles", len(places) * samples) as step,
    ):
        for length, depth in places:
            prompts = make_prompts(loaded, None, length, depth, samples, seed)
            for start in range(0, samples, batch):
                part = [prompt.ids for prompt in prompts[start : start + batch]]
                rates = zoom_in(kv, loaded, method, part, max_new_tokens)
                found += [rates] * len(part)
                step.advance(len(part))
    mean = torch.stack(found).mean(0)
    rows = [
        {
            "layer": at,
            "least": float(layer.min()),
            "mean": float(layer.mean()),
            "most": float(layer.max()),
        }
        for at, layer in enumerate(mean)
    ]
    measure.publish(rows, json_file, extra={"prompts": len(found), "rates": mean.tolist()})
    if plot is not None:
        from kv_bench.heatmap import draw_rates  # matplotlib takes a second to import

        with whole_file(plot) as temporary:
            draw_rates(mean.tolist(), f"{name}, budget {budget}", temporary)


def zoom_in(
    kv: Attached, loaded: Loaded, method: Method, prompts: list[list[int]], max_new_tokens: int
) -> Tensor:
    """Rates [layers, H_q] over the answers to a batch of prompts.

    Raises:
        ValueError: the method reports none.
    """
    ends = end_tokens(loaded.model, loaded.tokenizer)
    pad = pad_token(loaded.tokenizer, ends)
    ids, mask = left_padded(prompts, pad, loaded.model.device)
    cache = kv.cache(method)
    Generator(loaded.model, ends, pad, cache).more(ids, mask, max_new_tokens)
    details = [layer.details for layer in cache.report().layers if layer.kind == "compressed"]
    if not all("zoom_in" in of_layer for of_layer in details):
        raise ValueError(f"{method.name} reports no zoom-in rates; wanted sekv")
    return torch.tensor([of_layer["zoom_in"] for of_layer in details])
