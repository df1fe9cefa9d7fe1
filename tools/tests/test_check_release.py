"""A tag is accepted only if it names a published package at the version of its source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from check_release import release
from monorepo import PUBLISHED, Distribution

SCRIPT = Path(__file__).resolve().parent.parent / "check_release.py"


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree that holds kv-score at 1.2.0; returns its folder."""
    monkeypatch.setattr("monorepo.ROOT", tmp_path)
    folder = tmp_path / "packages" / "kv-score"
    (folder / "src" / "kv_score").mkdir(parents=True)
    (folder / "src" / "kv_score" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.0] - 2026-01-01\n\n- New.\n")
    return folder


def test_matching_tag(scored: Path) -> None:
    assert release("kv-score-v1.2.0").name == "kv-score"


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("kv-score-v1.2.1", "but kv-score is at 1.2.0"),
        ("kv-score-v1.2", "not of the form"),
        ("kv-score-1.2.0", "not of the form"),
        ("v1.2.0", "not of the form"),
        ("kv-none-v1.2.0", "no published distribution is called 'kv-none'"),
        ("kv-bench-v1.2.0", "no published distribution is called 'kv-bench'"),
        ("kv-score-v1.2.0\nkv-policies-v1.2.0", "not of the form"),
    ],
)
def test_refused_tag(scored: Path, tag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        release(tag)


def test_changelog_must_tell(scored: Path) -> None:
    (scored / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.01]\n")
    with pytest.raises(ValueError, match=r"has no section 1\.2\.0"):
        release("kv-score-v1.2.0")


def test_version_must_be_there(scored: Path) -> None:
    (scored / "src" / "kv_score" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="assigns no __version__"):
        release("kv-score-v1.2.0")


@pytest.mark.parametrize("distribution", PUBLISHED, ids=lambda d: d.name)
def test_this_tree_can_be_released(distribution: Distribution) -> None:
    tag = f"{distribution.name}-v{distribution.version}"
    result = subprocess.run(
        [sys.executable, SCRIPT, tag], capture_output=True, text=True, check=True
    )
    environment = "integration" if distribution.name == "kv-integration" else distribution.name
    assert result.stdout.splitlines() == [
        f"dist={distribution.name}",
        f"version={distribution.version}",
        f"environment={environment}",
    ]


def test_refusal_is_one_line() -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, "kv-score-v99.0.0"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
