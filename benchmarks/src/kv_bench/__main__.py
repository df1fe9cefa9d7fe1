"""`python -m kv_bench` is the console script without its name."""

from kv_bench.cli import main

main(prog_name="kv-bench")
