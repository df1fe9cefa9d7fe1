"""`python -m kv_integration.cli` is the console script without its name."""

from kv_integration.cli import main

main(prog_name="kv-integration")
