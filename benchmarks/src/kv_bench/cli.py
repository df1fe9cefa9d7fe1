"""The command line: `kv-bench`, one sub-command per benchmark."""

from __future__ import annotations

import click

from kv_bench import __version__
from kv_bench.niah import niah
from kv_integration.cli.errors import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kv-bench")
def main() -> None:
    """Measure KV-cache methods: one sub-command per benchmark."""


main.add_command(niah)
