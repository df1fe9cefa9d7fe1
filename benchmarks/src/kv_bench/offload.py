"""`kv-bench offload`: rows from the host, bytes a hit cache saves, memory to open a cache file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from kv_bench.measure import (
    equal,
    json_option,
    milliseconds,
    publish,
    set_threads,
    threads_option,
)
from kv_offload import HitCache, TieredStore, save_cache

MB = 1e6

# Runs in an interpreter of its own, which has read nothing yet. Opening counts by its highest
# resident memory, so that memory taken and given back counts too.
OPEN = """
import json, sys
import torch
from kv_offload import load_cache

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

torch.empty(1, 1, 1, dtype=torch.int64)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
store = load_cache(sys.argv[1], fingerprint="none").store("rows")
opened = status("VmHWM") - before
last = torch.full(store.shape[:2] + (1,), store.shape[2] - 1)
print(json.dumps({"opened": opened, "last": store.gather(last).flatten().tolist()}))
"""


@click.command()
@click.option("--tokens", type=click.IntRange(min=1), default=131072, show_default=True)
@click.option("--selected", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("--heads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--head-size", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=60,
    show_default=True,
    help="Decoding steps of the trace.",
)
@click.option(
    "--repetition",
    type=click.FloatRange(0, 1),
    default=0.6,
    show_default=True,
    help="Share of a step's selection that the step before it had.",
)
@click.option(
    "--file-mib",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Size of the cache file that is opened, in a folder for temporary files.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=25, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Where gathered rows go.")
@threads_option
@json_option
def offload(
    tokens: int,
    selected: int,
    heads: int,
    head_size: int,
    steps: int,
    repetition: float,
    file_mib: int,
    rounds: int,
    device: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Gather from the host, a hit cache on a trace with repetition, opening a cache file.

    bf16 rows. The other side of the gather is one index_select of the same rows, and their copy to
    the device where that is another one; of the hit cache, a store without one. Opening counts the
    resident memory it adds at its highest, in a process of its own (Linux).
    """
    if selected * (2 - repetition) > tokens:
        raise click.ClickException(
            f"--tokens {tokens} is too few: two steps of the trace select up to "
            f"{selected * (2 - repetition):.0f} different ones"
        )
    set_threads(threads)
    torch.manual_seed(0)
    values = torch.randn(1, heads, tokens, head_size).bfloat16()
    trace = make_trace(tokens, selected, heads, steps, repetition)
    rows = [
        gather_case(values, trace[0], rounds, device),
        trace_case(values, trace, device),
        open_case(file_mib, heads, head_size),
    ]
    publish(rows, json_file)


def make_trace(
    tokens: int, selected: int, heads: int, steps: int, repetition: float
) -> list[Tensor]:
    """int64 `[1, H, K]` per step, ascending; each repeats just that share of the one before."""
    kept = round(repetition * selected)
    trace = [random_ids(torch.zeros(heads, tokens), selected)]
    for _ in range(steps - 1):
        last = trace[-1][0]
        taken = torch.zeros(heads, tokens).scatter_(1, last, 1)
        old = last.gather(1, random_ids(torch.zeros_like(last, dtype=torch.float32), kept)[0])
        new = random_ids(taken, selected - kept)[0]
        trace.append(torch.cat([old, new], dim=1).sort(dim=1).values[None])
    return trace


def random_ids(taken: Tensor, count: int) -> Tensor:
    """int64 `[1, H, count]` ascending: other ones in each head, none where `taken` [H, N] is 1."""
    return (torch.rand(taken.shape) - taken).topk(count, dim=1).indices.sort(dim=1).values[None]


def gather_case(values: Tensor, indices: Tensor, rounds: int, device: str) -> dict[str, Any]:
    """One gather of `TieredStore` on the host against one `index_select` of the same rows."""
    _, heads, tokens, head_size = values.shape
    with TieredStore(values, tier="host", device=device) as store:
        flat = (indices + torch.arange(heads).view(1, heads, 1) * tokens).view(-1)
        table = values.view(heads * tokens, head_size)
        if device != "cpu":
            table = table.pin_memory()

        def plain() -> Tensor:
            if device == "cpu":
                return table.index_select(0, flat)
            out = torch.empty((flat.shape[0], head_size), dtype=table.dtype, pin_memory=True)
            return torch.index_select(table, 0, flat, out=out).to(device, non_blocking=True)

        case = f"gather {indices.shape[2]:,} of {tokens:,} tokens x {heads} heads x {head_size}"
        equal(case, store.gather(indices).view(-1, head_size).cpu(), plain().cpu())
        sides: dict[str, Callable[[], object]] = {
            "ours": lambda: store.gather(indices),
            "plain": plain,
        }
        ms = milliseconds(sides, rounds=rounds, warm_up=3)
    return {
        "case": case,
        "unit": "ms",
        "kv-offload": ms["ours"],
        "other": ms["plain"],
        "side": "index_select",
        "ratio": ms["plain"] / ms["ours"],
        "wanted": ">= 0.6 of its speed",
    }


def trace_case(values: Tensor, trace: list[Tensor], device: str) -> dict[str, Any]:
    """Bytes that a hit cache moves over a trace, against a store without one."""
    row_bytes = values.shape[3] * values.element_size()
    with TieredStore(values, tier="host", device=device) as store:
        cache = HitCache(store, capacity=trace[0].shape[2])
        case = f"{len(trace)} steps of a trace, hit cache"
        without = 0
        for indices in trace:
            rows = store.gather(indices)
            without += rows.numel() * rows.element_size()
            equal(case, cache.fetch(indices), rows)
        moved = cache.bytes_moved
        if moved != cache.misses * row_bytes or cache.hits + cache.misses != without // row_bytes:
            raise click.ClickException(f"{case}: the counts do not add up; no figure is given")
    return {
        "case": case,
        "unit": "MB moved",
        "kv-offload": moved / MB,
        "other": without / MB,
        "side": "store alone",
        "ratio": moved / without,
        "wanted": "<= 0.42 of its bytes",
    }


def open_case(file_mib: int, heads: int, head_size: int) -> dict[str, Any]:
    """Resident memory that opening a cache file adds before its first gather, at its highest."""
    if not Path("/proc/self/clear_refs").exists():
        raise click.ClickException("the memory of opening a file is read from Linux' /proc")
    case = f"open a cache file of {file_mib:,} MiB"
    tokens = (file_mib << 20) // (heads * head_size * 4)
    rows = torch.arange(heads * tokens * head_size, dtype=torch.int32)
    rows = rows.view(1, heads, tokens, head_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        save_cache(path, {"rows": rows}, method="none", fingerprint="none")
        size = path.stat().st_size
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise click.ClickException(f"{case}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    equal(case, torch.tensor(found["last"], dtype=torch.int32), rows[:, :, -1].flatten())
    return {
        "case": case,
        "unit": "MB resident",
        "kv-offload": found["opened"] / MB,
        "other": size / MB,
        "side": "the file's size",
        "ratio": found["opened"] / size,
        "wanted": "< 50 MB",
    }
