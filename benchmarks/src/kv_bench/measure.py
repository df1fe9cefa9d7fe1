"""Time and memory of two or more ways to the same result, and the record of a run.

The ways take turns within each round, so that whatever else the machine does falls on all of them
alike. A ratio is given only after `agree` has compared the results.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kv_integration import METHODS

Row = Mapping[str, Any]


def milliseconds(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 1,
    least_ms: float = 0.0,
) -> dict[str, float]:
    """Median time of each side over `rounds` rounds in which the sides take turns, in ms.

    A side that took less than `least_ms` in the round before is called as often as fills that
    time: a call of a few ms is not measured by what another side left in the processor's cache.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    calls = dict.fromkeys(sides, 1)
    for turn in range(warm_up + rounds):
        for name, side in sides.items():
            _wait()
            start = time.perf_counter()
            for _ in range(calls[name]):
                side()
            _wait()
            each = (time.perf_counter() - start) * 1e3 / calls[name]
            calls[name] = max(1, math.ceil(least_ms / each))
            if turn >= warm_up:
                taken[name].append(each)
    return {name: statistics.median(times) for name, times in taken.items()}


def free_one_block() -> None:
    """Let steps find their memory as they do in any process that has loaded a model.

    glibc hands freed memory back to the system, and a step that gets new pages each time waits for
    them, until a block of this size was freed once.
    """
    block = torch.empty(31 << 20, dtype=torch.uint8)
    del block


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """Most bytes that torch's allocator held beyond what it held before, its result included."""
    gc.collect()  # what is freed meanwhile must be what the call itself has made
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        call()
    held = peak = 0
    for event in sorted(
        (e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_resident_bytes(call: Callable[[], object]) -> int | None:
    """Most memory of the host that the process held beyond what it held before; Linux only."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        return None
    gc.collect()

    def read(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    try:
        reset.write_text("5")  # the peak starts anew
    except OSError:
        return None
    before = read("VmRSS")
    call()
    return max(read("VmHWM") - before, 0)


def peak_numpy_bytes(call: Callable[[], object]) -> int:
    """Most bytes that Python and numpy held beyond what they held before, the result included."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def agree(case: str, ours: Tensor, wanted: Tensor, *, within: float) -> None:
    """Refuses a case whose result is off by more than `within` times the wanted norm."""
    difference = torch.linalg.vector_norm(ours.double() - wanted.double())
    norm = torch.linalg.vector_norm(wanted.double())
    if not bool(difference <= within * norm):
        raise click.ClickException(
            f"{case}: the results differ by {float(difference):.3g}, which is more than {within} "
            f"of {float(norm):.3g}; no figure is given"
        )


def equal(case: str, ours: Tensor, wanted: Tensor) -> None:
    """Refuses a case whose result is not the wanted one, number by number."""
    if not torch.equal(ours, wanted):
        raise click.ClickException(f"{case}: the results differ; no figure is given")


def environment() -> dict[str, str | int]:
    """What a figure depends on: device, versions, threads, date."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": gpu or _cpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


def commit() -> str:
    """The commit that this code is of, "" outside its repository; "+" after it: with changes."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(folder), *arguments]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--short", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return ""


def publish(
    rows: Sequence[Row], json_file: Path | None, *, extra: Mapping[str, object] | None = None
) -> None:
    """Prints `rows` as a table; saves them with the command and the environment if asked to.

    extra: what else the file says of the run.
    """
    table = Table(box=box.MARKDOWN)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        left = isinstance(rows[0].get(name), str)
        table.add_column(name, justify="left" if left else "right", no_wrap=name == columns[0])
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in columns))
    Console(width=None if sys.stdout.isatty() else 320).print(table)
    if json_file is None:
        return
    command = " ".join(["kv-bench", *sys.argv[1:]])
    content = {"command": command, "environment": environment(), **(extra or {})}
    content["rows"] = list(rows)
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def methods_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--methods NAMES` of every command that runs methods, all of them unless told."""
    return click.option(
        "--methods",
        multiple=True,
        default=[",".join(METHODS)],
        show_default=True,
        metavar="NAMES",
        help="Methods with commas between, with options if you like: 'sablock(lam=0), h2o'.",
    )(command)


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--json FILE` of every command whose rows are published."""
    return click.option(
        "--json",
        "json_file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Also save the rows there, with the command, versions, device and date.",
    )(command)


def threads_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--threads N`; the command calls `set_threads`."""
    return click.option(
        "--threads",
        type=click.IntRange(min=1),
        help="CPU threads.  [default: torch's choice]",
    )(command)


def set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cpu() -> str:
    """The processor's name, from Linux' own table where there is one."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or "CPU"


def _text(value: object) -> str:
    if value is None:
        return ""
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, int | float) else str(value))
    )
