"""`kv-bench turns`: several needles in one prompt, asked for one after the other on one cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kv_bench.conversation import Conversation, conversation
from kv_bench.dialogue import dialogues
from kv_bench.folder import made_with
from kv_bench.grid import Results, TurnRow, Variant
from kv_bench.niah import niah
from kv_bench.options import check_counts
from kv_bench.variants import make, make_variants, parse_lengths
from kv_integration import METHODS, haystack
from kv_integration.answer import is_correct
from kv_integration.cli.files import whole_file
from kv_integration.cli.inputs import (
    Loaded,
    check_positions,
    load_model,
    parse_names,
    read_text,
    settle,
)
from kv_integration.cli.progress import Steps


@click.command(params=[option for option in niah.params if option.name not in ("depths", "match")])
@click.option("--turns", "count", default=8, show_default=True, help="Needles, and turns.")
def turns(
    methods: tuple[str, ...],
    contexts: str,
    budgets: str,
    samples: int,
    out: Path,
    text_file: Path | None,
    folder: Path | None,
    seed: int,
    batch: int,
    max_new_tokens: int,
    dtype: str,
    device: str,
    threads: int | None,
    count: int,
) -> None:
    """Needles asked for in turns: does a method still know what the first question was not about?

    The first prompt holds a document, its needles and the first question; the other questions are
    later turns of the same conversation, after the answers that the model gave. Leaves results.csv,
    results.json and a figure of accuracy by turn for each length in DIR.

    \b
    Examples:
      kv-bench turns --contexts 4096 --budgets 0.1 --samples 25 --out turns
      kv-bench turns --methods full,snapkv,quest --contexts 2048 --turns 4 --out turns
    """
    variants = make_variants(parse_names(methods, known=METHODS), budgets)
    lengths = parse_lengths(contexts)
    check_counts(turns=count, samples=samples, batch=batch)
    settle(seed, threads, max_new_tokens)
    text = None if text_file is None else read_text(text_file, "haystack")
    with Steps() as steps:
        with steps.step("loading the model"):
            loaded = load_model(folder, dtype=dtype, device=device)
        results = Results(
            out,
            made_with(
                "turns",
                loaded,
                text,
                seed=seed,
                samples=samples,
                turns=count,
                max_new_tokens=max_new_tokens,
            ),
            TurnRow,
        )
        with steps.step("conversations", total=len(lengths) * samples) as step:
            for length in lengths:
                todo = [v for v in variants if not results.has(v, length, count)]
                if not todo:
                    step.advance(samples)
                    continue
                talks = make_conversations(loaded, text, length, count, samples, seed)
                longest = max(len(talk.ids) + sum(map(len, talk.later)) for talk in talks)
                check_positions(loaded.model, longest, count * max_new_tokens)
                right = [[0] * count for _ in todo]
                for start in range(0, samples, batch):
                    part = talks[start : start + batch]
                    for total, new in zip(
                        right, count_right(loaded, part, todo, max_new_tokens), strict=True
                    ):
                        total[:] = [a + b for a, b in zip(total, new, strict=True)]
                    step.advance(len(part))
                results.add(
                    TurnRow(v.method, length, turn, v.budget, samples, found / samples)
                    for v, of_variant in zip(todo, right, strict=True)
                    for turn, found in enumerate(of_variant, 1)
                )
        with steps.step("drawing figures", total=len(lengths)) as step:
            for length in lengths:
                draw_figure(results, variants, length)
                step.advance()
    print_summary(results, variants, lengths, count)


def make_conversations(
    loaded: Loaded, text: str | None, length: int, count: int, samples: int, seed: int
) -> list[Conversation]:
    """The conversations of one length, the same for all methods and in every run."""
    keys = haystack.read_keys(loaded.folder)
    return [
        conversation(
            loaded.tokenizer,
            context=length,
            turns=count,
            seed=f"{seed}:{length}:{count}:{sample}",
            keys=keys,
            text=text,
        )
        for sample in range(samples)
    ]


def count_right(
    loaded: Loaded,
    conversations: Sequence[Conversation],
    variants: Sequence[Variant],
    max_new_tokens: int,
) -> list[list[int]]:
    """How many right answers each variant gives in each turn."""
    texts = dialogues(
        loaded.model,
        loaded.tokenizer,
        conversations,
        [make(variant) for variant in variants],
        max_new_tokens=max_new_tokens,
    )
    return [
        [
            sum(
                is_correct(row[turn], one.expected[turn])
                for row, one in zip(of_method, conversations, strict=True)
            )
            for turn in range(len(conversations[0].expected))
        ]
        for of_method in texts
    ]


def draw_figure(results: Results[TurnRow], variants: Sequence[Variant], length: int) -> None:
    """`turns-CONTEXT.png` of all `variants`."""
    from kv_bench.turnplot import draw  # matplotlib takes a second to import

    rows = {
        variant.label: [row for row in results.of(variant) if row.context == length]
        for variant in variants
    }
    with whole_file(results.folder / f"turns-{length}.png") as temporary:
        draw(rows, f"needles asked for in turns, {length:,} tokens", temporary)


def print_summary(
    results: Results[TurnRow], variants: Sequence[Variant], lengths: Sequence[int], count: int
) -> None:
    """Accuracy by turn, to stdout."""
    table = Table(box=box.SIMPLE_HEAD, caption=f"right answers by turn; {results.folder}")
    for name in ("method", "budget", "tokens"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for turn in range(1, count + 1):
        table.add_column(str(turn), justify="right")
    table.add_column("mean", justify="right")
    for variant in variants:
        for length in lengths:
            found = [row.accuracy for row in results.of(variant) if row.context == length]
            cells = [f"{x:.0%}" for x in found] + [f"{sum(found) / len(found):.1%}"]
            table.add_row(variant.method, str(variant.budget), f"{length:,}", *cells)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
