"""`kv-bench niah`: needle in a haystack, accuracy over context length and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kv_bench.answers import answers
from kv_bench.folder import made_with
from kv_bench.grid import Results, Row, Variant
from kv_bench.matched import Key, Match, as_run, check_shares, find_all, match_option
from kv_bench.measure import methods_option, publish
from kv_bench.options import (
    budgets_option,
    check_counts,
    haystack_option,
    model_option,
    out_option,
    run_options,
)
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


@click.command()
@methods_option
@click.option(
    "--contexts",
    default="512,1024,2048,4096,8192",
    show_default=True,
    metavar="TOKENS",
    help="Prompt lengths with commas between.",
)
@click.option(
    "--depths", default=5, show_default=True, help="Places of the needle, from start to end."
)
@budgets_option
@match_option
@click.option("--samples", default=10, show_default=True, help="Prompts per length and depth.")
@out_option
@haystack_option
@model_option
@click.option("--seed", default=0, show_default=True, help="Draws texts, keys and numbers.")
@click.option("--batch", default=4, show_default=True, help="Prompts that run together.")
@click.option("--max-new-tokens", default=12, show_default=True, help="Tokens per answer.")
@run_options
def niah(
    methods: tuple[str, ...],
    contexts: str,
    depths: int,
    budgets: str,
    match: str,
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
) -> None:
    """Needle in a haystack: how often a number stated once in a long text is found again.

    Leaves results.csv, results.json and a heat map per method and budget in DIR. With --match
    device budgets are shares of full KV's bytes on the device; the entries that each method may
    attend for it are found on the first prompt of each length, and budgets.json says which.

    \b
    Examples:
      kv-bench niah --out results
      kv-bench niah --contexts 512,2048 --budgets 0.05,0.1,0.2 --samples 20 --out results
      kv-bench niah --methods full,sablock --budgets 256 --haystack novel.txt --out novel
      kv-bench niah --methods full,sekv,snapkv --budgets 0.05,0.1 --match device --out matched
    """
    variants = make_variants(parse_names(methods, known=METHODS), budgets)
    check_shares(variants, match)
    lengths = parse_lengths(contexts)
    check_counts(depths=depths, samples=samples, batch=batch)
    settle(seed, threads, max_new_tokens)
    text = None if text_file is None else read_text(text_file, "haystack")
    with Steps() as steps:
        with steps.step("loading the model"):
            loaded = load_model(folder, dtype=dtype, device=device)
        check_positions(loaded.model, max(lengths), max_new_tokens)
        results = Results(
            out,
            made_with(
                "niah" if match == "entries" else "niah, matched on device bytes",
                loaded,
                text,
                seed=seed,
                samples=samples,
                max_new_tokens=max_new_tokens,
            ),
            Row,
        )
        found: dict[Key, Match] | None = None
        if match == "device":
            firsts = first_prompts(loaded, text, lengths, depths, seed)
            with steps.step("budgets", total=len(lengths) * len(variants)) as step:
                found = find_all(
                    loaded,
                    variants,
                    firsts,
                    steps=max_new_tokens,
                    folder=out,
                    advance=step.advance,
                )
        runs = as_run(variants, lengths, found)
        places = [(length, depth) for length in lengths for depth in places_of(depths)]
        with steps.step("needles", total=len(places) * samples) as step:
            for length, depth in places:
                todo = [
                    v
                    for v in variants
                    if (v.label, length) in runs and not results.has(v, length, depth)
                ]
                if not todo:
                    step.advance(samples)
                    continue
                prompts = make_prompts(loaded, text, length, depth, samples, seed)
                right = [0] * len(todo)
                for start in range(0, samples, batch):
                    part = prompts[start : start + batch]
                    ways = [runs[v.label, length] for v in todo]
                    counts = count_right(loaded, part, ways, max_new_tokens)
                    right = [before + new for before, new in zip(right, counts, strict=True)]
                    step.advance(len(part))
                results.add(
                    Row(v.method, length, depth, v.budget, samples, count / samples)
                    for v, count in zip(todo, right, strict=True)
                )
        with steps.step("drawing heat maps", total=len(variants)) as step:
            for variant in variants:
                if results.of(variant):
                    draw_heat_map(results, variant)
                step.advance()
    print_summary(results, variants, lengths)
    if found is not None:
        publish([asdict(found[v.label, n]) for v in variants for n in lengths], None)


def places_of(count: int) -> list[float]:
    """`count` depths evenly from 0 to 1; a single one in the middle."""
    return [0.5] if count == 1 else [round(at / (count - 1), 4) for at in range(count)]


def first_prompts(
    loaded: Loaded, text: str | None, lengths: Sequence[int], depths: int, seed: int
) -> Mapping[int, Sequence[int]]:
    """Ids of each length's first prompt, on which budgets are found."""
    depth = places_of(depths)[0]
    return {n: make_prompts(loaded, text, n, depth, 1, seed)[0].ids for n in lengths}


def make_prompts(
    loaded: Loaded, text: str | None, length: int, depth: float, samples: int, seed: int
) -> list[haystack.Prompt]:
    """The prompts of one cell, the same for all methods and in every run."""
    keys = haystack.read_keys(loaded.folder)
    return [
        haystack.needle_prompt(
            loaded.tokenizer,
            context=length,
            depth=depth,
            seed=f"{seed}:{length}:{depth}:{sample}",
            keys=keys,
            text=text,
            source="the haystack",
        )
        for sample in range(samples)
    ]


def count_right(
    loaded: Loaded,
    prompts: Sequence[haystack.Prompt],
    variants: Sequence[Variant],
    max_new_tokens: int,
) -> list[int]:
    """How many of `prompts` each variant answers right."""
    texts = answers(
        loaded.model,
        loaded.tokenizer,
        [prompt.ids for prompt in prompts],
        [make(variant) for variant in variants],
        max_new_tokens=max_new_tokens,
    )
    return [
        sum(
            is_correct(text, prompt.expected or "")
            for text, prompt in zip(of_method, prompts, strict=True)
        )
        for of_method in texts
    ]


def draw_heat_map(results: Results[Row], variant: Variant) -> None:
    """`niah-METHOD-BUDGET.png` from all rows of `variant`."""
    from kv_bench.heatmap import draw  # matplotlib takes a second to import

    title = variant.method if variant.method == "full" else f"{variant.method}, {variant.budget}"
    with whole_file(results.folder / f"niah-{variant.stem}.png") as temporary:
        draw(results.of(variant), title, temporary)


def print_summary(
    results: Results[Row], variants: Sequence[Variant], lengths: Sequence[int]
) -> None:
    """Accuracy by context, mean over depths, to stdout."""
    table = Table(box=box.SIMPLE_HEAD, caption=f"right answers, mean over depths; {results.folder}")
    table.add_column("method")
    table.add_column("budget", justify="right")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for variant in variants:
        cells = []
        for length in lengths:
            found = [row.accuracy for row in results.of(variant) if row.context == length]
            cells.append(f"{sum(found) / len(found):.1%}" if found else "-")
        table.add_row(variant.method, str(variant.budget), *cells)
    Console().print(table)
