"""Run every suite under coverage, with few examples per law, and print one report for all.

Wants all distributions and their test requirements installed: `tox run -e coverage`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from monorepo import ALL

PYTEST = ("-m", "pytest", "-q", "--hypothesis-profile=quick")


def coverage(*arguments: str, cwd: Path | None = None) -> int:
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=cwd).returncode


def main(data: Path) -> int:
    """Suites run one by one: their conftest modules share a name. Returns the first failure."""
    data.parent.mkdir(parents=True, exist_ok=True)
    os.environ["COVERAGE_FILE"] = str(data)
    codes = [
        coverage(
            *("run", "--parallel-mode", f"--source={distribution.import_name}"),
            *(*PYTEST, "tests"),
            cwd=distribution.path,
        )
        for distribution in ALL
    ]
    codes += [coverage("combine", str(data.parent)), coverage("report", "--skip-covered")]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
