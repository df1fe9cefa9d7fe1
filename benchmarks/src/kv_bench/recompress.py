"""`kv-bench recompress`: device bytes over a conversation, with and without compressing again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from kv_bench import measure, subject
from kv_bench.options import check_counts
from kv_bench.variants import method_named
from kv_integration import METHODS, Method, attach
from kv_integration.cli.inputs import Loaded, parse_budget, parse_names


@click.command()
@measure.methods_option
@click.option("--budget", default="256", show_default=True, help="Entries or share of all tokens.")
@click.option("--context", default=1024, show_default=True, help="Tokens of the first turn.")
@click.option("--turns", default=20, show_default=True, help="Turns after the first.")
@click.option("--tokens", default=128, show_default=True, help="Tokens of each of them.")
@click.option("--after", default=256, show_default=True, help="`recompress_after`.")
@measure.threads_option
@measure.json_option
def recompress(
    methods: tuple[str, ...],
    budget: str,
    context: int,
    turns: int,
    tokens: int,
    after: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Bytes that a cache of the embedded model holds after a prompt and after many more turns.

    A method that can compress again runs twice, without `recompress_after` and with it. The text is
    prose, the same for all. `at_most_kib` is over all turns; `full_kv_kib` is what keys
    and values of all tokens take at the end.
    """
    names, granted = parse_names(methods, known=METHODS), parse_budget(budget)
    check_counts(context=context, turns=turns, tokens=tokens)
    measure.set_threads(threads)
    loaded = subject.load("embedded", layers=None, dtype=torch.float32)
    ids = subject.prose(loaded, context + turns * tokens)
    parts = ids.split([context] + [tokens] * turns, dim=1)
    rows: list[dict[str, Any]] = []
    for name in names:
        method = method_named(name, granted)
        for limit in (None, after) if method.recompresses else (None,):
            held, full = conversation(loaded, method, parts, limit)
            rows.append(
                {
                    "case": name,
                    "recompress_after": "never" if limit is None else str(limit),
                    "prompt_kib": held[0] / 1024,
                    "half_way_kib": held[len(held) // 2] / 1024,
                    "last_kib": held[-1] / 1024,
                    "at_most_kib": max(held) / 1024,
                    "full_kv_kib": full / 1024,
                    "share_of_full_kv": held[-1] / full,
                }
            )
    measure.publish(rows, json_file)


def conversation(
    loaded: Loaded, method: Method, parts: tuple[Tensor, ...], limit: int | None
) -> tuple[list[int], int]:
    """Device and host bytes after each part, and what full KV would take at the end."""
    held = []
    with attach(loaded.model, loaded.tokenizer) as kv, torch.inference_mode():
        cache = kv.cache(method, recompress_after=limit)
        for part in parts:
            loaded.model(part, past_key_values=cache, logits_to_keep=1)
            report = cache.report()
            held.append(report.device_bytes + report.host_bytes)
    return held, report.full_kv_bytes
