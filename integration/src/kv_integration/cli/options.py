"""Options that `ask` and `compare` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kv_integration.cli.inputs import CONTEXT, DEPTH, DTYPES

Command = Callable[..., Any]

SHARED = (
    click.option("--document", type=click.Path(path_type=Path), help="Text file (UTF-8) to read."),
    click.option("--question", help="What to ask about the document."),
    click.option(
        "--context",
        type=int,
        help=f"Without a document: tokens of the prompt that is built.  [default: {CONTEXT}]",
    ),
    click.option(
        "--depth",
        type=float,
        help=f"Without a document: where the needle is, 0 (start) to 1 (end).  [default: {DEPTH}]",
    ),
    click.option("--seed", default=0, show_default=True, help="Draws text, key and number."),
    click.option(
        "--model",
        "folder",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Model folder in transformers' format.  [default: the embedded model]",
    ),
    click.option(
        "--budget",
        default="1024",
        show_default=True,
        help="Entries of the prompt that a step may attend: a number, or a share such as 0.1.",
    ),
    click.option("--max-new-tokens", default=24, show_default=True, help="Tokens to generate."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", *DTYPES]),
        default="auto",
        show_default=True,
        help="Of the model; auto: float32 on a CPU, as stored on a GPU.",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="auto: a CUDA GPU where there is one.",
    ),
    click.option("--threads", type=int, help="CPU threads.  [default: torch's choice]"),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
)


def shared_options(command: Command) -> Command:
    """Add the options that both commands have."""
    for option in reversed(SHARED):
        command = option(command)
    return command
