"""The inspection of archives finds each thing that must not be there, or must."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from check_wheels import readme_example, sdist_problems, wheel_problems
from monorepo import INTEGRATION, Distribution, by_name

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: 1.2.0
License-Expression: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: numpy>=1.26
Requires-Dist: pytest; extra == 'test'
"""


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "version", "1.2.0")


def wheel(
    folder: Path,
    distribution: Distribution,
    *,
    without: str = "",
    extra: tuple[str, ...] = (),
    metadata: str = METADATA,
) -> Path:
    package = distribution.import_name
    info = f"{package}-1.2.0.dist-info"
    names = (f"{package}/__init__.py", f"{package}/py.typed", f"{info}/licenses/LICENSE", *extra)
    path = folder / f"{package}-1.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata.format(name=distribution.name))
        for name in names:
            if not without or not name.endswith(without):
                archive.writestr(name, "")
    return path


def test_sound_wheel(tmp_path: Path) -> None:
    score = by_name("kv-score")
    assert wheel_problems(wheel(tmp_path, score), score) == []


@pytest.mark.parametrize("name", ["__init__.py", "py.typed", "LICENSE"])
def test_missing_file(tmp_path: Path, name: str) -> None:
    score = by_name("kv-score")
    (problem,) = wheel_problems(wheel(tmp_path, score, without=name), score)
    assert problem.startswith("no ") and problem.endswith(name)


@pytest.mark.parametrize(
    "name", ["kv_score/tests/helpers.py", "kv_score/test_laws.py", "kv_score/conftest.py"]
)
def test_tests_inside(tmp_path: Path, name: str) -> None:
    score = by_name("kv-score")
    assert wheel_problems(wheel(tmp_path, score, extra=(name,)), score) == [f"a test: {name}"]


def test_stray_top_level_folder(tmp_path: Path) -> None:
    score = by_name("kv-score")
    problems = wheel_problems(wheel(tmp_path, score, extra=("helpers/a.py",)), score)
    assert problems == ["a stray file: helpers/a.py"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("1.2.0\n", "1.1.0\n", "Version is '1.1.0', wanted '1.2.0'"),
        ("Apache-2.0", "MIT", "License-Expression is 'MIT', wanted 'Apache-2.0'"),
        (">=3.10", ">=3.12", "Requires-Python is '>=3.12', wanted '>=3.10'"),
        ("numpy>=1.26", "kv_policies>=0.1", "requires kv-policies"),
    ],
)
def test_wrong_metadata(tmp_path: Path, old: str, new: str, problem: str) -> None:
    score = by_name("kv-score")
    path = wheel(tmp_path, score, metadata=METADATA.replace(old, new))
    assert wheel_problems(path, score) == [problem]


def test_integration_requires_all_six(tmp_path: Path) -> None:
    path = wheel(tmp_path, INTEGRATION, metadata=METADATA + "Requires-Dist: kv-score>=0.1\n")
    assert wheel_problems(path, INTEGRATION) == [
        f"does not require {name}"
        for name in ("kv-attn-triton", "kv-lowrank", "kv-offload", "kv-policies", "kv-segment")
    ]


def test_sdist(tmp_path: Path) -> None:
    path = tmp_path / "kv_score-1.2.0.tar.gz"
    source = tmp_path / "file"
    source.touch()
    with tarfile.open(path, "w:gz") as archive:
        for name in ("LICENSE", "README.md", "pyproject.toml"):
            archive.add(source, f"kv_score-1.2.0/{name}")
    assert sdist_problems(path, by_name("kv-score")) == ["no CHANGELOG.md"]


def test_readme_example_is_the_first_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monorepo.ROOT", tmp_path)
    readme = tmp_path / "packages" / "kv-score" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("```\nshell\n```\n```python\nfirst = 1\n```\n```python\nsecond = 2\n```\n")
    assert readme_example(by_name("kv-score")) == "first = 1\n"
    readme.write_text("```\nshell\n```\n")
    with pytest.raises(ValueError, match="has no python block"):
        readme_example(by_name("kv-score"))
