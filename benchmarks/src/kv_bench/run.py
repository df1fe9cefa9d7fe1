"""`kv-bench run`: tasks with methods and budgets, one line per sample, resumable at any moment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kv_bench import measure
from kv_bench.folder import SETTINGS, check_settings, digest, made_with
from kv_bench.journal import JOURNAL, Journal, Record
from kv_bench.kvpress_form import write_kvpress_form
from kv_bench.options import (
    budgets_option,
    check_counts,
    haystack_option,
    model_option,
    out_option,
    run_options,
)
from kv_bench.runner import MODES, OWN, SHARED, make_runner
from kv_bench.summary import Summary, summarise, write_summary
from kv_bench.tasks import PerplexityTask, Task, expand, known_tasks, task_named
from kv_bench.variants import Registry, make_variants, own_methods, parse_lengths
from kv_integration import METHODS
from kv_integration.cli.inputs import load_model, parse_names, read_text, settle
from kv_integration.cli.progress import Steps


@click.command()
@click.argument("tasks", metavar="TASK[,TASK...]")
@measure.methods_option
@click.option(
    "--method-module",
    "modules",
    multiple=True,
    metavar="FILE.py:NAME",
    help="A method of your own; runs too, under its name in lower case. May be given repeatedly.",
)
@budgets_option
@click.option(
    "--contexts",
    metavar="TOKENS",
    help="Prompt and answer lengths with commas between.  [default: each task's own]",
)
@click.option("--samples", type=int, help="Samples per context.  [default: each task's own]")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default=MODES[0],
    show_default=True,
    help="aware: context and question are compressed; agnostic: the context alone, the question "
    "comes as a later turn.",
)
@click.option(
    "--prefill",
    type=click.Choice([SHARED, OWN]),
    default=SHARED,
    show_default=True,
    help="shared: a prompt passes the model once for all methods; own: once for each, which takes "
    "longer and tells the time to the first token.",
)
@click.option(
    "--setting",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Changes a setting of all TASKs, such as depths=11. May be given repeatedly.",
)
@click.option(
    "--data",
    multiple=True,
    metavar="[TASK=]PATH",
    help="Where a task's data set is: file, folder or hub id.  [default: the published hub id]",
)
@haystack_option
@out_option
@model_option
@click.option("--seed", default=0, show_default=True, help="Draws what a task draws.")
@click.option("--max-new-tokens", type=int, help="Tokens per answer.  [default: each task's own]")
@run_options
def run(
    tasks: str,
    methods: tuple[str, ...],
    modules: tuple[str, ...],
    budgets: str,
    contexts: str | None,
    samples: int | None,
    mode: str,
    prefill: str,
    changes: tuple[str, ...],
    data: tuple[str, ...],
    text_file: Path | None,
    out: Path,
    folder: Path | None,
    seed: int,
    max_new_tokens: int | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> None:
    """Measure methods on TASKs, or groups of them: all methods and budgets on the same samples.

    Leaves samples.jsonl (one line per sample, method and budget), summary.csv, summary.json and
    kvpress/ (the same in the form of kvpress' evaluation) in DIR.

    \b
    Examples:
      kv-bench run niah_single_1 --contexts 2048,8192 --budgets 0.05,0.2 --samples 20 --out results
      kv-bench run longbench --data longbench/ --model llama --mode agnostic --out longbench
    """
    changed = parse_settings(changes)
    chosen = parse_tasks(tasks, changed)
    own = own_methods(modules)
    registry: Registry = {**METHODS, **{name: found for name, (found, _) in own.items()}}
    names = parse_names([*methods, *own], known=registry)
    variants = make_variants(names, budgets, registry)
    lengths: list[int | None] = [None] if contexts is None else [*parse_lengths(contexts)]
    check_counts(samples=1 if samples is None else samples)
    settle(seed, threads, 1 if max_new_tokens is None else max_new_tokens)
    places = parse_data(data, [task.name for task in chosen])
    text = None if text_file is None else read_text(text_file, "haystack")
    with Steps() as steps:
        with steps.step("loading the model"):
            loaded = load_model(folder, dtype=dtype, device=device)
        settings = made_with(
            "run", loaded, text, seed=seed, samples=samples, max_new_tokens=max_new_tokens
        )
        added: dict[str, object] = {f"data of {name}": place for name, place in places.items()}
        added |= {f"settings of {task.name}": changed for task in chosen}
        added |= {f"method {name}": digest(source) for name, (_, source) in own.items()}
        check_settings(out, settings, results=JOURNAL, added=added)
        with Journal(out) as journal:
            for task in chosen:
                for length in lengths:
                    runner = make_runner(
                        task,
                        loaded,
                        registry,
                        blank=Record(task.name, task.metric, mode, length),
                        prefill=prefill,
                        max_new_tokens=max_new_tokens,
                        length=length,
                        count=samples,
                        seed=seed,
                        data=places.get(task.name),
                        text=text,
                    )
                    title = task.name if length is None else f"{task.name}, {length:,} tokens"
                    with steps.step(title, total=len(runner.ids)) as step:
                        for at in range(len(runner.ids)):
                            runner.run(at, variants, journal)
                            step.advance()
            rows = summarise(journal.records)
            command = " ".join(["kv-bench", *sys.argv[1:]])
            about = {
                "command": command,
                "settings": json.loads((out / SETTINGS).read_text(encoding="utf-8")),
                "environment": measure.environment(),
            }
            write_summary(out, rows, about)
            write_kvpress_form(
                out / "kvpress",
                rows,
                journal.records,
                model=loaded.folder.resolve().name,
                device=str(loaded.model.device),
                seed=seed,
                model_kwargs={"dtype": str(loaded.model.dtype).removeprefix("torch.")},
            )
    print_summary(rows, out)


def parse_tasks(text: str, settings: Mapping[str, str]) -> list[Task | PerplexityTask]:
    """Tasks by name or by group, each once, with `settings` of theirs changed.

    Raises:
        ValueError: a name or a setting is unknown, or there is no name; the text lists what exists.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"no task is given, got {text!r}; {known_tasks()}")
    found = dict.fromkeys(task for name in names for task in expand(name))
    return [task_named(name, **typed(task_named(name), settings)) for name in found]


def typed(task: Task | PerplexityTask, settings: Mapping[str, str]) -> dict[str, object]:
    """`settings` as what they are in `task`: numbers where it has numbers.

    Raises:
        ValueError: a number is wanted and not given.
    """
    found: dict[str, object] = {}
    for name, text in settings.items():
        kind = type(getattr(task, name, None))
        try:
            found[name] = kind(text) if kind in (int, float) else text
        except ValueError:
            raise ValueError(
                f"--setting {name} of {task.name} must be of type {kind.__name__}, got {text!r}"
            ) from None
    return found


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` each; of two with one name the later holds.

    Raises:
        ValueError: one is not.
    """
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (_, equals, _) in zip(texts, pairs, strict=True) if not equals]:
        raise ValueError(f"--setting must be NAME=VALUE, got {wrong[0]!r}")
    return {name: value for name, _, value in pairs}


def parse_data(texts: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """Place of each task's data: `TASK=PATH`, or `PATH` for all tasks that are not named.

    Raises:
        ValueError: two places for one task, or a place for a task that does not run.
    """
    places: dict[str, str] = {}
    general: list[str] = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals:
            general.append(text)
            continue
        if name not in tasks:
            raise ValueError(f"--data {text} is for {name!r}, which does not run")
        if name in places:
            raise ValueError(f"--data has two places for {name}: {places[name]} and {path}")
        places[name] = path
    if len(general) > 1:
        raise ValueError(f"--data must say which task each place is for, got {', '.join(general)}")
    return {**{name: place for name in tasks for place in general}, **places}


def print_summary(rows: Sequence[Summary], folder: Path) -> None:
    """Scores by task and variant to stdout; what failed is counted."""
    table = Table(box=box.SIMPLE_HEAD, caption=str(folder))
    for column in ("task", "mode", "tokens", "method", "budget"):
        table.add_column(column)
    for column in ("score", "entries", "device MiB", "samples"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.task} ({row.metric})",
            row.mode,
            "" if row.context is None else f"{row.context:,}",
            row.method,
            "" if row.method == "full" else str(row.budget),
            score_text(row),
            "" if row.entries_attended is None else f"{row.entries_attended:,.0f}",
            "" if row.device_bytes is None else f"{row.device_bytes / 2**20:,.2f}",
            str(row.samples) + (f", {row.failed} out of memory" if row.failed else ""),
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def score_text(row: Summary) -> str:
    """The score for people: percent, or a perplexity."""
    if row.score is None:
        return "-"
    return f"{row.score:.3f}" if row.lower_is_better else f"{row.score:.1%}"
