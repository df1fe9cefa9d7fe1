"""The total counts every test once, and an environment that failed outside of its tests."""

from __future__ import annotations

import json
from pathlib import Path

from summary import summary

SUITE = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'


def write(folder: Path, name: str, *counts: int) -> None:
    (folder / f"{name}.xml").write_text(SUITE.format(*counts))


def result(folder: Path, **success: bool) -> Path:
    path = folder / "result.json"
    environments = {name: {"result": {"success": value}} for name, value in success.items()}
    path.write_text(json.dumps({"testenvs": {".pkg": {}, **environments}}))
    return path


def test_total(tmp_path: Path) -> None:
    write(tmp_path, "one", 10, 1, 2, 3)
    write(tmp_path, "two", 5, 0, 0, 0)
    one, two, closing = summary(tmp_path)
    assert one.split() == ["one", "4", "passed,", "3", "failed,", "3", "skipped"]
    assert two.split() == ["two", "5", "passed,", "0", "failed,", "0", "skipped"]
    assert closing == "9 passed, 3 failed, 3 skipped"


def test_nothing_ran(tmp_path: Path) -> None:
    assert summary(tmp_path) == ["0 passed, 0 failed"]
    assert summary(tmp_path, tmp_path / "absent.json")[-1] == "0 passed, 1 failed"


def test_environment_that_failed_outside_of_its_tests(tmp_path: Path) -> None:
    write(tmp_path, "lint", 5, 0, 0, 0)
    path = result(tmp_path, lint=False, wheels=False)
    assert summary(tmp_path, path)[-1] == "5 passed, 2 failed"


def test_failed_tests_are_not_counted_twice(tmp_path: Path) -> None:
    write(tmp_path, "one", 5, 2, 0, 0)
    assert summary(tmp_path, result(tmp_path, one=False))[-1] == "3 passed, 2 failed"


def test_success_adds_nothing(tmp_path: Path) -> None:
    write(tmp_path, "one", 5, 0, 0, 0)
    assert summary(tmp_path, result(tmp_path, one=True))[-1] == "5 passed, 0 failed"


def test_an_interpreter_that_is_missing_shows(tmp_path: Path) -> None:
    write(tmp_path, "one", 5, 0, 0, 0)
    path = tmp_path / "result.json"
    skipped = {"result": {"success": False, "skipped": True}}
    path.write_text(json.dumps({"testenvs": {"one-py310": skipped}}))
    one, missing, closing = summary(tmp_path, path)
    assert one.split()[0] == "one"
    assert missing.split() == ["one-py310", "0", "passed,", "0", "failed,", "1", "skipped"]
    assert closing == "5 passed, 0 failed, 1 skipped"
