"""`kv-bench speed`: time to the first token and per decoding step, beside transformers' cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from kv_bench import measure, subject
from kv_bench.variants import parse_lengths
from kv_integration import METHODS, Method, attach
from kv_integration.cli.inputs import (
    DTYPES,
    DYNAMIC,
    Loaded,
    make_method,
    parse_budget,
    parse_names,
)
from kv_integration.cli.progress import Steps

WANTED_PREFILL, WANTED_STEP = 1.03, 1.0


@click.command()
@measure.methods_option
@click.option("--budget", default="0.1", show_default=True, help="Entries or share of the prompt.")
@click.option(
    "--contexts",
    default="8192,16384",
    show_default=True,
    metavar="TOKENS",
    help="Prompt lengths with commas between.",
)
@click.option(
    "--shape",
    type=click.Choice(["embedded", *subject.SHAPES]),
    default="embedded",
    show_default=True,
    help="The embedded model, or random weights of a known shape.",
)
@click.option("--layers", type=click.IntRange(min=1), help="Of a random model.  [default: all]")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="float32",
    show_default=True,
    help="Weights.",
)
@click.option("--rounds", default=3, show_default=True, help="Prefills per side.")
@click.option("--steps", default=16, show_default=True, help="Decoding steps per side.")
@measure.threads_option
@measure.json_option
def speed(
    methods: tuple[str, ...],
    budget: str,
    contexts: str,
    shape: str,
    layers: int | None,
    dtype: str,
    rounds: int,
    steps: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Time to the first token and per step, both beside DynamicCache with SDPA.

    A prefill of each method comes after one with DynamicCache, round by round; then all sides take
    turns, one token each per step.
    """
    names, granted = parse_names(methods, known=METHODS), parse_budget(budget)
    lengths = parse_lengths(contexts)
    measure.set_threads(threads)
    loaded = subject.load(shape, layers=layers, dtype=DTYPES[dtype])
    rows: list[dict[str, Any]] = []
    with torch.inference_mode(), Steps() as progress:
        for context in lengths:
            methods_of = [(name, make_method(name, granted)) for name in names]
            prefills = 1 + 2 * rounds * len(names)
            with progress.step(
                f"{context} tokens", prefills + (steps + 1) * (len(names) + 1)
            ) as step:
                figures = compare(
                    loaded, methods_of, context, rounds=rounds, steps=steps, advance=step.advance
                )
            rows += [{"case": name, "shape": shape, "context": context, **f} for name, f in figures]
    measure.publish(rows, json_file)


def compare(
    loaded: Loaded,
    methods: Sequence[tuple[str, Method | None]],
    context: int,
    *,
    rounds: int,
    steps: int,
    advance: Callable[[], None],
) -> list[tuple[str, dict[str, float]]]:
    """Figures of each method over one prompt.

    A method's prefill and one of DynamicCache's follow each other, so that a machine whose speed
    drifts does as much to both.
    """
    sides = [(DYNAMIC, None), *methods]
    ids = subject.prose(loaded, context)
    theirs: dict[str, list[float]] = {name: [] for name, _ in methods}
    ours: dict[str, list[float]] = {name: [] for name, _ in methods}
    each: dict[str, list[float]] = {name: [] for name, _ in sides}
    caches: dict[str, Cache] = {}
    logits: dict[str, Tensor] = {}

    def prefill(name: str, method: Method | None) -> float:
        caches.pop(name, None)
        with running(loaded, method) as make:
            start = time.perf_counter()
            caches[name] = make()
            out = loaded.model(ids, past_key_values=caches[name], logits_to_keep=1)
            seconds = time.perf_counter() - start
        logits[name] = out.logits
        advance()
        return seconds

    within = 1e-2 if loaded.model.dtype == torch.float32 else 5e-2
    prefill(DYNAMIC, None)
    for _ in range(rounds):
        for name, method in methods:
            theirs[name].append(prefill(DYNAMIC, None))
            ours[name].append(prefill(name, method))
    for name, _ in methods:
        measure.agree(f"{name}, first token", logits[name], logits[DYNAMIC], within=within)
    token = logits[DYNAMIC].argmax(-1)
    for _ in range(steps + 1):
        for name, method in sides:
            with running(loaded, method):
                start = time.perf_counter()
                loaded.model(token, past_key_values=caches[name])
                each[name].append(time.perf_counter() - start)
            advance()
    step = {name: statistics.median(times[1:]) * 1e3 for name, times in each.items()}
    ttft = {name: statistics.median(times) * 1e3 for name, times in ours.items()}
    dynamic_ttft = {name: statistics.median(times) * 1e3 for name, times in theirs.items()}
    return [
        (
            name,
            {
                "ttft_ms": ttft[name],
                "dynamic_ttft_ms": dynamic_ttft[name],
                "ttft_ratio": ttft[name] / dynamic_ttft[name],
                "wanted_ttft_ratio": WANTED_PREFILL,
                "step_ms": step[name],
                "dynamic_step_ms": step[DYNAMIC],
                "step_ratio": step[name] / step[DYNAMIC],
                "wanted_step_ratio": WANTED_STEP,
            },
        )
        for name, _ in methods
    ]


@contextmanager
def running(loaded: Loaded, method: Method | None) -> Iterator[Callable[[], Cache]]:
    """The model ready for one side (attached for our caches only), and how its cache is made."""
    if method is None:
        yield lambda: DynamicCache(config=loaded.model.config)
        return
    with attach(loaded.model, loaded.tokenizer) as kv:
        yield lambda: kv.cache(method)
