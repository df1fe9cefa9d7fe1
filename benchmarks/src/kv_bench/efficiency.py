"""`kv-bench efficiency`: the papers' efficiency tables, for any model shape with random weights.

One row per method, context and batch: time to the first token, time per output token, throughput,
peak memory of device and host, and what stays. Batches double until memory is full, so the last row
of a method is its throughput at the largest batch that fits (SentenceKV, Tables 3 and 4;
SemantiCache, Table 3; ShadowKV, Tables 3 to 6; SABlock, Figure 8; SeKV, Table 3 and Figure 4).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click
import torch
from transformers import Cache

from kv_bench import measure, subject, synthetic
from kv_bench.ask import is_out_of_memory, release
from kv_bench.speed import running
from kv_bench.variants import parse_lengths
from kv_integration import METHODS, KVCache, Method
from kv_integration.answer import cache_bytes
from kv_integration.cli.inputs import (
    DTYPES,
    DYNAMIC,
    Loaded,
    make_method,
    parse_budget,
    parse_names,
)
from kv_integration.cli.progress import Steps

MIB = 2**20


@click.command()
@measure.methods_option
@click.option("--budget", default="0.1", show_default=True, help="Entries or share of the prompt.")
@click.option(
    "--contexts",
    default="4096,16384,65536",
    show_default=True,
    metavar="TOKENS",
    help="Prompt lengths with commas between.",
)
@click.option(
    "--shape",
    type=click.Choice(list(subject.SHAPES)),
    default="llama-1b",
    show_default=True,
    help="A known shape.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A config.json of transformers, instead of --shape.",
)
@click.option("--layers", type=click.IntRange(min=1), help="[default: all that the shape has]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: a GPU if there is]")
@click.option(
    "--prefill-up-to",
    default=8192,
    show_default=True,
    metavar="TOKENS",
    help="Longer contexts, and batches above 1, decode on caches with random keys and values.",
)
@click.option("--max-batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Largest memory of a cache and what making it takes.  [default: until it runs out]",
)
@click.option("--steps", type=click.IntRange(min=2), default=8, show_default=True)
@measure.threads_option
@measure.json_option
def efficiency(
    methods: tuple[str, ...],
    budget: str,
    contexts: str,
    shape: str,
    config_file: Path | None,
    layers: int | None,
    dtype: str,
    device: str | None,
    prefill_up_to: int,
    max_batch: int,
    memory: float | None,
    steps: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Time, memory and throughput of methods beside DynamicCache; random weights.

    `source` says whether a prompt passed the model (prefill) or the cache was filled with random
    keys and values (synthetic), which has no time to the first token.
    """
    names, granted = parse_names(methods, known=METHODS), parse_budget(budget)
    lengths = parse_lengths(contexts)
    measure.set_threads(threads)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no CUDA GPU")
    loaded = subject.random_model(
        subject.config_of(shape) if config_file is None else subject.read_config(config_file),
        layers=layers,
        dtype=DTYPES[dtype],
        device=where,
    )
    limit = None if memory is None else int(memory * 2**30)
    rows: list[dict[str, Any]] = []
    sides = [DYNAMIC, *(name for name in names if name != DYNAMIC)]
    total = len(lengths) * len(sides)
    with torch.no_grad(), Steps() as progress, progress.step("efficiency", total) as step:
        for context in lengths:
            for name in sides:
                side = Side(loaded, make_method(name, granted), context, steps)
                for row in batches(side, max_batch, limit, prefill_up_to):
                    rows.append({"case": name, "context": context, **row})
                step.advance()
    measure.publish(rows, json_file)


def batches(side: Side, most: int, limit: int | None, prefill_up_to: int) -> list[dict[str, Any]]:
    """A row for each batch size that fits: 1, 2, 4, ... up to `most`; `note` says why no more."""
    rows: list[dict[str, Any]] = []
    batch = 1
    while batch <= most:
        prefill = batch == 1 and side.context <= prefill_up_to
        try:
            row = side.measure(batch, prefill=prefill)
        except synthetic.NoFillError as error:
            row = {"batch": batch, "source": "synthetic", "note": str(error)}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            row = {"batch": batch, "note": "out of memory"}
        release()
        if limit is not None and row.get("device_peak_mib", 0) * MIB > limit:
            row = {"batch": batch, "note": f"more than {limit / 2**30:g} GiB"}
        rows.append(row)
        if "note" in row:
            break
        batch *= 2
    return rows


class Side:
    """One method, or DynamicCache where it is None, at one context."""

    def __init__(self, loaded: Loaded, method: Method | None, context: int, steps: int) -> None:
        self.loaded, self.method, self.context, self.steps = loaded, method, context, steps

    def measure(self, batch: int, *, prefill: bool) -> dict[str, Any]:
        """The cache is made for its memory, and once more for its time; then it decodes."""
        model = self.loaded.model
        with running(self.loaded, self.method) as new_cache:
            made: list[Cache] = []
            make = self._maker(new_cache, batch, prefill, made)
            peak = measure.peak_bytes(make, str(model.device.type))
            made.clear()
            resident = None  # on a CPU memory given back stays resident, and `peak` says it
            if model.device.type == "cuda":
                resident = measure.peak_resident_bytes(make)
                made.clear()
            start = time.perf_counter()
            make()
            ttft = time.perf_counter() - start
            cache = made[0]
            token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
            times = []
            for _ in range(self.steps + 1):
                start = time.perf_counter()
                token = model(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
                token[0, 0].item()  # waits for the device
                times.append(time.perf_counter() - start)
            per_token = statistics.median(times[1:])
            return {
                "batch": batch,
                "source": "prefill" if prefill else "synthetic",
                "ttft_ms": 1e3 * ttft if prefill else None,
                "tpot_ms": 1e3 * per_token,
                "tokens_per_s": batch / per_token,
                "device_peak_mib": peak / MIB,
                "host_peak_mib": None if resident is None else resident / MIB,
                **held(cache),
            }

    def _maker(
        self, new_cache: Callable[[], Cache], batch: int, prefill: bool, made: list[Cache]
    ) -> Callable[[], None]:
        """A call that leaves a filled cache in `made`."""
        model = self.loaded.model
        size = int(model.config.get_text_config(decoder=True).vocab_size)
        ids = torch.arange(batch * self.context, device=model.device).view(batch, -1) * 37 % size

        def make() -> None:
            cache = new_cache()
            made.append(cache)
            if prefill:
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
                logits.argmax(-1)[0, 0].item()
            else:
                synthetic.fill(model, cache, batch=batch, tokens=self.context)

        return make


def held(cache: Cache) -> dict[str, float]:
    """What stays on device and host, and what full KV of as many tokens takes."""
    if not isinstance(cache, KVCache):
        size = cache_bytes(cast(Any, cache))
        return {"device_mib": size / MIB, "host_mib": 0.0, "full_kv_mib": size / MIB}
    report = cache.report()
    return {
        "device_mib": report.device_bytes / MIB,
        "host_mib": report.host_bytes / MIB,
        "full_kv_mib": report.full_kv_bytes / MIB,
    }
