"""`kv-bench sweep`: needles found over a method's parameters, all settings behind one prefill."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kv_bench import measure
from kv_bench.matched import as_run, check_shares, find_all, match_option
from kv_bench.niah import count_right, first_prompts, make_prompts, places_of
from kv_bench.options import check_counts
from kv_bench.variants import make_variants, parse_lengths
from kv_integration import METHODS
from kv_integration.cli.inputs import check_positions, load_model, settle
from kv_integration.cli.progress import Steps
from kv_integration.cli.spec import options_of, parse_specs


@click.command()
@click.option("--methods", multiple=True, required=True, help="Methods, with options or without.")
@click.option(
    "--vary",
    multiple=True,
    required=True,
    metavar="OPTION=VALUES",
    help="Values of an option with commas between, such as lam=0,0.5,1; may be given again.",
)
@click.option(
    "--product", is_flag=True, help="All combinations of the values, not one option at a time."
)
@click.option(
    "--contexts", default="512,1024,2048", show_default=True, help="Prompt lengths, commas between."
)
@click.option("--depths", default=5, show_default=True, help="Places of the needle.")
@click.option("--budgets", default="0.05,0.1", show_default=True, help="With commas between.")
@match_option
@click.option("--samples", default=20, show_default=True, help="Prompts per length and depth.")
@click.option("--batch", default=4, show_default=True, help="Prompts that run together.")
@click.option(
    "--seed",
    default=1000,
    show_default=True,
    help="Of the prompts; not the one that `niah` evaluates with.",
)
@measure.threads_option
@measure.json_option
def sweep(
    methods: tuple[str, ...],
    vary: tuple[str, ...],
    product: bool,
    contexts: str,
    depths: int,
    budgets: str,
    match: str,
    samples: int,
    batch: int,
    seed: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Share of needles that the embedded model finds, for each setting of a method.

    Every prompt passes the model once for all settings, so that one more costs a few decoding
    steps. The settings of a method are compared on the same prompts. With --match device each has
    the entries that keep it within a share of full KV's bytes on the device; a setting that cannot
    has no figure.

    \b
    Examples:
      kv-bench sweep --methods sablock --vary lam=0,0.5,1 --vary window=8,16,32 --threads 1
      kv-bench sweep --methods "sekv(router=embedded)" --vary anchors=False --match device
    """
    variants = make_variants(settings(methods, vary, product=product), budgets)
    check_shares(variants, match)
    lengths = parse_lengths(contexts)
    check_counts(depths=depths, samples=samples, batch=batch)
    settle(seed, threads, 1)
    loaded = load_model(None, dtype="auto", device="cpu")
    check_positions(loaded.model, max(lengths), NEW_TOKENS)
    found = None
    if match == "device":
        firsts = first_prompts(loaded, None, lengths, depths, seed)
        with Steps() as steps, steps.step("budgets", len(lengths) * len(variants)) as step:
            found = find_all(loaded, variants, firsts, steps=NEW_TOKENS, advance=step.advance)
    runs = as_run(variants, lengths, found)
    right: dict[int, Counter[str]] = {length: Counter() for length in lengths}
    with Steps() as steps, steps.step("needles", len(lengths) * depths * samples) as step:
        for length, depth in itertools.product(lengths, places_of(depths)):
            todo = [v for v in variants if (v.label, length) in runs]
            if not todo:
                step.advance(samples)
                continue
            prompts = make_prompts(loaded, None, length, depth, samples, seed)
            for start in range(0, samples, batch):
                part = prompts[start : start + batch]
                ways = [runs[v.label, length] for v in todo]
                counts = count_right(loaded, part, ways, NEW_TOKENS)
                right[length].update({v.label: n for v, n in zip(todo, counts, strict=True)})
                step.advance(len(part))
    prompts_each = depths * samples
    rows: list[dict[str, Any]] = []
    for variant in variants:
        shares = {
            str(n): right[n][variant.label] / prompts_each if (variant.label, n) in runs else None
            for n in lengths
        }
        given = [share for share in shares.values() if share is not None]
        mean = sum(given) / len(lengths) if len(given) == len(lengths) else None
        row = {"case": variant.method, "budget": variant.budget, **shares, "mean": mean}
        if found is not None:
            matches = [found[variant.label, n] for n in lengths]
            row |= {f"entries at {m.context}": m.entries for m in matches}
            row |= {f"device at {m.context}": m.reached for m in matches}
        rows.append(row)
    measure.publish(rows, json_file)


NEW_TOKENS = 4  # a number is two tokens, and the next shows that it ended


def settings(methods: Sequence[str], vary: Sequence[str], *, product: bool) -> list[str]:
    """Every method as it is given and with each value of the options that it has.

    Raises:
        ValueError: an option of `vary` that no method has, or a value that it does not take.
    """
    values = [_values(text) for text in vary]
    specs = parse_specs(methods, known=METHODS)
    for option, _ in values:
        if not any(option in options_of(spec.name) for spec in specs):
            known = sorted({name for spec in specs for name in options_of(spec.name)})
            raise ValueError(f"no method has option {option!r}; known: {', '.join(known)}")
    texts = []
    for spec in specs:
        own = [
            [(option, value) for value in given]
            for option, given in values
            if option in options_of(spec.name)
        ]
        given = {name: repr(value) for name, value in spec.options.items()}
        changes = itertools.product(*own) if product else ((one,) for row in own for one in row)
        for change in ((), *changes):
            options = ",".join(f"{name}={value}" for name, value in (given | dict(change)).items())
            texts.append(f"{spec.name}({options})")
    return [str(spec) for spec in parse_specs(texts, known=METHODS)]


def _values(text: str) -> tuple[str, list[str]]:
    """`lam=0,0.5` as the option's name and its values, unread."""
    option, _, given = text.partition("=")
    values = [value.strip() for value in given.split(",") if value.strip()]
    if not option.strip().isidentifier() or not values:
        raise ValueError(f"--vary must be an option and its values such as lam=0,1, got {text!r}")
    return option.strip(), values
