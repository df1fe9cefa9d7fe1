"""Options that several commands have: methods' budgets, model, text, folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from kv_integration.cli.inputs import DTYPES

budgets_option = click.option(
    "--budgets",
    default="0.1",
    show_default=True,
    metavar="BUDGETS",
    help="Entries of the prompt that a step may attend, numbers or shares, with commas between.",
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Results go here; a second call goes on where the first was stopped.",
)
haystack_option = click.option(
    "--haystack",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text (UTF-8) that prompts are made of.  [default: prose the embedded model has not read]",
)
model_option = click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Model folder in transformers' format.  [default: the embedded model]",
)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--dtype`, `--device` and `--threads` of a command that loads a model of the user's."""
    for option in (
        click.option("--threads", type=int, help="CPU threads.  [default: torch's choice]"),
        click.option(
            "--device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            show_default=True,
            help="auto: a CUDA GPU where there is one.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", *DTYPES]),
            default="auto",
            show_default=True,
            help="Of the model; auto: float32 on a CPU, as stored on a GPU.",
        ),
    ):
        command = option(command)
    return command


def check_counts(**counts: int) -> None:
    """Raise ValueError, with the option's name, for a number below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
