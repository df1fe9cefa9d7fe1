"""`kv-integration compare`: several methods on the same prompt, one table and one figure."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kv_integration import METHODS
from kv_integration.cli.files import check_writable, whole_file, write_text
from kv_integration.cli.inputs import (
    DYNAMIC,
    Request,
    load_model,
    make_method,
    make_prompt,
    parse_budget,
    parse_names,
    settle,
)
from kv_integration.cli.options import shared_options
from kv_integration.cli.progress import Steps
from kv_integration.cli.result import answer_with
from kv_integration.cli.table import markdown, print_table

ALL = ",".join([DYNAMIC, *METHODS])
FIGURES = (".png", ".svg", ".pdf")


@click.command()
@click.option(
    "--methods",
    multiple=True,
    default=[ALL],
    show_default=True,
    metavar="NAMES",
    help="Methods with commas between, with options if you like: 'sablock(lam=0), h2o'; dynamic is "
    "transformers' own cache.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Write a figure here."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE.md", help="Write the table here."
)
@shared_options
def compare(
    methods: tuple[str, ...],
    plot: Path | None,
    out: Path | None,
    document: Path | None,
    question: str | None,
    context: int | None,
    depth: float | None,
    seed: int,
    folder: Path | None,
    budget: str,
    max_new_tokens: int,
    dtype: str,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Let several methods answer the same question, and compare answers, bytes and times.

    Without --document a haystack is built: real prose with one needle, which the question asks
    for, so that each answer is known to be right or wrong.

    \b
    Examples:
      kv-integration compare
      kv-integration compare --context 4096 --budget 0.1 --plot compare.png --out compare.md
      kv-integration compare --document notes.txt --question "Who chaired the meeting?" --json
    """
    names = parse_names(methods)
    request = Request(document, question, context, depth, seed)
    request.check()
    settle(seed, threads, max_new_tokens)
    granted = parse_budget(budget)
    for name in names:
        make_method(name, granted)
    if plot is not None:
        check_writable("--plot", plot, suffixes=FIGURES)
    if out is not None:
        check_writable("--out", out)
    text = request.text()
    with Steps() as steps:
        with steps.step("loading the model"):
            loaded = load_model(folder, dtype=dtype, device=device)
        with steps.step("building the prompt"):
            prompt = make_prompt(request, text, loaded, max_new_tokens)
        click.echo(f"prompt: {prompt.caption}", err=True)
        results = []
        with steps.step("methods", total=len(names)) as done:
            for name in names:
                results.append(
                    answer_with(
                        name,
                        granted,
                        loaded=loaded,
                        prompt=prompt,
                        max_new_tokens=max_new_tokens,
                        steps=steps,
                    )
                )
                done.advance()
        if plot is not None:
            with steps.step("drawing the figure"), whole_file(plot) as temporary:
                from kv_integration.cli.plot import draw  # matplotlib takes a second to import

                draw(results, prompt.caption, temporary)
    if out is not None:
        write_text(out, markdown(results, prompt.caption))
    if as_json:
        records = [result.as_dict() for result in results]
        click.echo(json.dumps(records, ensure_ascii=False, indent=2))
    else:
        print_table(results, prompt.caption)
