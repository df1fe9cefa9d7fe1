"""The command line: `kv-integration ask`, `compare` and `train-router`."""

from __future__ import annotations

import click

from kv_integration import __version__
from kv_integration.cli.ask import ask
from kv_integration.cli.compare import compare
from kv_integration.cli.errors import Commands
from kv_integration.cli.train_router import train_router_command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kv-integration")
def main() -> None:
    """Answer a question over a long text from a compressed KV cache.

    \b
    kv-integration ask --document notes.txt --question "Who chaired the meeting?"
    kv-integration compare --context 8192 --plot compare.png
    """


main.add_command(ask)
main.add_command(compare)
main.add_command(train_router_command)

__all__ = ["main"]
