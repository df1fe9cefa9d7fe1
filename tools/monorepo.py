"""The distributions of this repository: where each lives, what it imports as, its version."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Distribution:
    name: str
    folder: str

    @property
    def path(self) -> Path:
        return ROOT / self.folder

    @property
    def import_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        """`__version__` as written in the source, read without importing it."""
        init = self.path / "src" / self.import_name / "__init__.py"
        for node in ast.parse(init.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
                return str(ast.literal_eval(node.value))
        raise ValueError(f"{init} assigns no __version__")


PRIMITIVES = tuple(
    Distribution(name, f"packages/{name}")
    for name in (
        "kv-segment",
        "kv-score",
        "kv-lowrank",
        "kv-offload",
        "kv-attn-triton",
        "kv-policies",
    )
)
INTEGRATION = Distribution("kv-integration", "integration")
BENCHMARKS = Distribution("kv-bench", "benchmarks")
PUBLISHED = (*PRIMITIVES, INTEGRATION)
ALL = (*PUBLISHED, BENCHMARKS)


def by_name(name: str) -> Distribution:
    """The published distribution called `name`."""
    for distribution in PUBLISHED:
        if distribution.name == name:
            return distribution
    known = ", ".join(distribution.name for distribution in PUBLISHED)
    raise ValueError(f"no published distribution is called {name!r}; wanted one of {known}")
