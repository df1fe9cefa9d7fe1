"""Fail unless this environment holds one package of the repository, installed, and no sibling.

python tools/check_isolated.py kv-score
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from monorepo import ALL, by_name

# kv-segment works on text and token ids: installing it must not bring a framework.
FORBIDDEN = {"kv-segment": ("torch", "transformers")}


def problems(name: str, prefix: str = sys.prefix) -> list[str]:
    """What is wrong with the running environment as a place to test `name` alone."""
    package = by_name(name)
    found = []
    spec = find_spec(package.import_name)
    if spec is None or spec.origin is None:
        found.append(f"{package.import_name} is not installed")
    elif not Path(spec.origin).resolve().is_relative_to(Path(prefix).resolve()):
        found.append(f"{package.import_name} comes from {spec.origin}, outside of {prefix}")
    unwanted = [other.import_name for other in ALL if other != package]
    unwanted += FORBIDDEN.get(name, ())
    found += [f"{module} can be imported" for module in unwanted if find_spec(module)]
    return found


if __name__ == "__main__":
    if found := problems(sys.argv[1]):
        sys.exit(f"{sys.argv[1]} is not alone in {sys.prefix}: " + "; ".join(found))
