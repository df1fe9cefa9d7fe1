"""Workflows follow GitHub's schema (the copy that check-jsonschema ships) and name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from monorepo import PRIMITIVES, PUBLISHED, ROOT

WORKFLOWS = ROOT / ".github" / "workflows"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def validate(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    return subprocess.run(
        [*command, "vendor.github-workflows", *files], capture_output=True, text=True, check=False
    )


def test_workflows_follow_the_schema() -> None:
    files = sorted(WORKFLOWS.glob("*.yml"))
    assert [file.name for file in files] == ["publish.yml", "test.yml"]
    result = validate(*files)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [("runs-on:", "run-on:"), ("fail-fast: false", "fail-fast: [1]"), ("\njobs:", "\njob:")],
)
def test_schema_refuses_mistakes(tmp_path: Path, old: str, new: str) -> None:
    text = (WORKFLOWS / "test.yml").read_text(encoding="utf-8")
    assert old in text
    broken = tmp_path / "broken.yml"
    broken.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert validate(broken).returncode == 1


def test_matrix_is_every_package_on_every_python() -> None:
    matrix = load(WORKFLOWS / "test.yml")["jobs"]["package"]["strategy"]["matrix"]
    assert matrix["package"] == [distribution.name for distribution in PRIMITIVES]
    assert matrix["python"] == ["3.10", "3.11", "3.12", "3.13"]


def test_tag_filter_matches_every_distribution() -> None:
    # YAML 1.1 reads the key `on` as true
    (pattern,) = load(WORKFLOWS / "publish.yml")[True]["push"]["tags"]
    expression = pattern.replace("*", "[^/]*")
    for distribution in PUBLISHED:
        assert re.fullmatch(expression, f"{distribution.name}-v{distribution.version}")


def test_hooks_run_the_linters_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    revisions = {
        repository["repo"].rsplit("/", 1)[1]: repository["rev"].removeprefix("v")
        for repository in load(ROOT / ".pre-commit-config.yaml")["repos"]
    }
    for name, repository in (
        ("ruff", "ruff-pre-commit"),
        ("check-jsonschema", "check-jsonschema"),
    ):
        assert re.search(rf"^{name}=={re.escape(revisions[repository])}\b", constraints, re.M)
