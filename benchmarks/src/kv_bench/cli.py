"""The command line: `kv-bench`, one sub-command per benchmark."""

from __future__ import annotations

import click

from kv_bench import __version__
from kv_bench.decode_step import decode_step
from kv_bench.divergence import divergence
from kv_bench.efficiency import efficiency
from kv_bench.lowrank import lowrank
from kv_bench.memory import memory
from kv_bench.methods_step import methods_step
from kv_bench.niah import niah
from kv_bench.offload import offload
from kv_bench.peers import peers
from kv_bench.policies import policies
from kv_bench.recompress import recompress
from kv_bench.report import report
from kv_bench.run import run
from kv_bench.score import score
from kv_bench.segment import segment
from kv_bench.speed import speed
from kv_bench.sweep import sweep
from kv_bench.turns import turns
from kv_bench.zoom import zoom
from kv_integration.cli.errors import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kv-bench")
def main() -> None:
    """Measure KV-cache methods: one sub-command per benchmark."""


for command in (
    run,
    report,
    niah,
    decode_step,
    divergence,
    efficiency,
    lowrank,
    memory,
    methods_step,
    offload,
    peers,
    policies,
    recompress,
    score,
    segment,
    speed,
    sweep,
    turns,
    zoom,
):
    main.add_command(command)
