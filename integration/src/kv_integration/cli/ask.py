"""`kv-integration ask`: one question, one method."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kv_integration.cli.inputs import (
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
from kv_integration.cli.result import Result, answer_with
from kv_integration.cli.table import with_share
from kv_integration.report import format_bytes


@click.command()
@click.option(
    "--method",
    default="sentencekv",
    show_default=True,
    help="How the cache is held, with options if you like: 'sablock(lam=0)'.",
)
@shared_options
def ask(
    method: str,
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
    """Ask one question about a long text, answered from a compressed cache.

    Without --document a haystack is built: real prose with one needle, which the question asks
    for, so that the answer is known to be right or wrong.

    \b
    Examples:
      kv-integration ask --document notes.txt --question "Who chaired the meeting?"
      kv-integration ask --context 8192 --depth 0.5 --budget 0.1
      kv-integration ask --method sablock --budget 512 --model ./Llama-3.2-1B --json
    """
    names = parse_names([method])
    if len(names) > 1:
        raise ValueError(f"--method takes one method, got {method!r}; `compare` takes several")
    request = Request(document, question, context, depth, seed)
    request.check()
    settle(seed, threads, max_new_tokens)
    granted = parse_budget(budget)
    make_method(names[0], granted)
    text = request.text()
    with Steps() as steps:
        with steps.step("loading the model"):
            loaded = load_model(folder, dtype=dtype, device=device)
        with steps.step("building the prompt"):
            prompt = make_prompt(request, text, loaded, max_new_tokens)
        click.echo(f"prompt: {prompt.caption}", err=True)
        result = answer_with(
            names[0],
            granted,
            loaded=loaded,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            steps=steps,
        )
    if as_json:
        click.echo(json.dumps(result.as_dict(), ensure_ascii=False, indent=2))
    else:
        click.echo(describe(result))


def describe(result: Result) -> str:
    """The answer and its figures, for people."""
    answer = result.answer
    verdict = ""
    if result.correct is not None:
        verdict = f"  ({result.verdict}" + ("" if result.correct else f": {result.expected}") + ")"
    later = "-" if answer.per_token_s is None else f"{1000 * answer.per_token_s:.1f} ms"
    tiers = [("on the device", answer.device_bytes), ("on the host", answer.host_bytes)]
    lines = [
        ("answer", f"{answer.answer}{verdict}"),
        ("method", f"{result.label}, budget {answer.budget}"),
        ("prompt", f"{answer.prompt_tokens} tokens"),
        (
            "attended",
            with_share(f"{answer.entries_attended}", answer.entries_attended, answer.prompt_tokens)
            + " entries per step and KV head",
        ),
        *(
            (where, f"{format_bytes(size)}, {size / answer.full_kv_bytes:.1%} of full KV")
            for where, size in tiers
        ),
        ("full KV", format_bytes(answer.full_kv_bytes)),
        ("first token", f"{answer.ttft_s:.2f} s"),
        ("each token after", later),
    ]
    return "\n".join(f"{name:<17} {text}" for name, text in lines)
