"""`kv-bench memory`: what a prefill holds at its peak, and what stays when it is over."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from kv_bench import measure, subject
from kv_bench.variants import method_named
from kv_integration import METHODS, attach
from kv_integration.cli.inputs import DTYPES, parse_budget, parse_names

MIB = 2**20


@click.command()
@measure.methods_option
@click.option("--budget", default="0.1", show_default=True, help="Entries or share of the prompt.")
@click.option("--context", default=32768, show_default=True, help="Tokens of the prompt.")
@click.option(
    "--shape", type=click.Choice(list(subject.SHAPES)), default="wide-kv", show_default=True
)
@click.option("--layers", type=click.IntRange(min=1), help="[default: all that the shape has]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@measure.threads_option
@measure.json_option
def memory(
    methods: tuple[str, ...],
    budget: str,
    context: int,
    shape: str,
    layers: int | None,
    dtype: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Peak bytes of a prefill beyond those of the same prefill without any cache.

    Weights and activations, one layer's queries, keys and values among them, are on both sides and
    drop out: what is left is the cache, and what its method needs for a moment.
    """
    names, granted = parse_names(methods, known=METHODS), parse_budget(budget)
    measure.set_threads(threads)
    loaded = subject.load(shape, layers=layers, dtype=DTYPES[dtype])
    ids = subject.prose(loaded, context)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        plain = measure.peak_bytes(lambda: loaded.model(ids, use_cache=False, logits_to_keep=1))
        for name in names:
            method = method_named(name, granted)
            with attach(loaded.model, loaded.tokenizer) as kv:
                cache = kv.cache(method)
                call = partial(loaded.model, ids, past_key_values=cache, logits_to_keep=1)
                peak = measure.peak_bytes(call)
            report = cache.report()
            held = report.device_bytes + report.host_bytes
            layer = report.full_kv_bytes / len(report.layers)
            rows.append(
                {
                    "case": name,
                    "context": context,
                    "full_kv_mib": report.full_kv_bytes / MIB,
                    "layer_full_kv_mib": layer / MIB,
                    "held_mib": held / MIB,
                    "peak_mib": (peak - plain) / MIB,
                    "peak_less_held_in_layers": (peak - plain - held) / layer,
                }
            )
    measure.publish(rows, json_file)
