"""The check fails for a missing package, one outside of the environment, and any sibling."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_isolated


def module(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()


def test_alone_and_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "kv_score")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_isolated.problems("kv-score", str(tmp_path)) == []


def test_not_installed() -> None:
    assert check_isolated.problems("kv-score") == ["kv_score is not installed"]


def test_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "kv_score")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = check_isolated.problems("kv-score", str(tmp_path / "elsewhere"))
    assert "outside of" in problem


def test_sibling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "kv_score")
    module(tmp_path, "kv_policies")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_isolated.problems("kv-score", str(tmp_path)) == ["kv_policies can be imported"]


def test_segments_need_no_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "kv_segment")
    module(tmp_path, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    assert "torch can be imported" in check_isolated.problems("kv-segment", str(tmp_path))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="no published distribution is called 'kv-none'"):
        check_isolated.problems("kv-none")
