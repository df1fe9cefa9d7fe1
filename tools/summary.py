"""Add up what the tox environments wrote: `python tools/summary.py .tox/junit [RESULT.json]`.

One line per environment, then the total. What failed outside of the tests (an installation, a
linter), according to tox's result file, counts as one failure, as does a result file that tox did
not come to write. An environment that did not run for want of an interpreter counts as one skip.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

# tests in all, failed, skipped
Counts = tuple[int, int, int]


def read_junit(file: Path) -> Counts:
    suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    return tests, failures + errors, skipped


def outcomes(result: Path) -> dict[str, dict[str, object]]:
    """What tox's result file says of each environment."""
    if not result.is_file():
        return {"tox": {"success": False}}
    environments = json.loads(result.read_text(encoding="utf-8")).get("testenvs", {})
    return {name: outcome.get("result", {}) for name, outcome in environments.items()}


def summary(junit: Path, result: Path | None = None) -> list[str]:
    counts = {file.stem: read_junit(file) for file in sorted(junit.glob("*.xml"))}
    for name, outcome in outcomes(result).items() if result else ():
        tests, failed, skipped = counts.get(name, (0, 0, 0))
        if outcome.get("skipped"):
            counts[name] = (1, 0, 1)
        elif not outcome.get("success", True) and not failed:
            counts[name] = (tests + 1, 1, skipped)
    lines = []
    total = [0, 0, 0]
    for name, (tests, failed, skipped) in sorted(counts.items()):
        row = (tests - failed - skipped, failed, skipped)
        total = [left + right for left, right in zip(total, row, strict=True)]
        lines.append("{:<20}{:>6} passed, {} failed, {} skipped".format(name, *row))
    closing = f"{total[0]} passed, {total[1]} failed"
    return [*lines, closing + (f", {total[2]} skipped" if total[2] else "")]


if __name__ == "__main__":
    print("\n".join(summary(*map(Path, sys.argv[1:]))))
