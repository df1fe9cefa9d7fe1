"""Check that a release tag names a published distribution at its present version.

    python tools/check_release.py kv-score-v0.1.0

Prints `dist=`, `version=` and `environment=` (tox) lines, as a workflow step's outputs.
"""

from __future__ import annotations

import re
import sys

from monorepo import INTEGRATION, Distribution, by_name


def release(tag: str) -> Distribution:
    """The distribution that `tag` releases; ValueError when the tag and the source disagree."""
    match = re.fullmatch(r"(?P<name>[a-z-]+)-v(?P<version>\d+\.\d+\.\d+[a-z0-9.]*)", tag)
    if match is None:
        raise ValueError(f"the tag {tag!r} is not of the form <distribution>-v<version>")
    distribution = by_name(match["name"])
    if distribution.version != match["version"]:
        raise ValueError(
            f"the tag {tag!r} is for version {match['version']}, "
            f"but {distribution.name} is at {distribution.version}"
        )
    changelog = (distribution.path / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[?{re.escape(match['version'])}\]?(\s|$)", changelog, re.MULTILINE):
        raise ValueError(f"{distribution.folder}/CHANGELOG.md has no section {match['version']}")
    return distribution


if __name__ == "__main__":
    try:
        released = release(sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
    print(f"dist={released.name}")
    print(f"version={released.version}")
    print(f"environment={'integration' if released == INTEGRATION else released.name}")
