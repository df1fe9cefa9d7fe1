"""The model that is shipped inside the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kv_integration import embedded
from kv_integration.cli import main


def test_it_finds_a_needle_in_512_tokens_with_full_kv() -> None:
    records = []
    for seed in range(5):
        depth = str(seed / 4)
        result = CliRunner().invoke(
            main,
            [
                *("ask", "--method", "full", "--context", "512", "--depth", depth),
                *("--seed", str(seed), "--max-new-tokens", "6", "--json"),
            ],
        )
        assert result.exit_code == 0, result.stderr
        records.append(json.loads(result.stdout))
    assert len({record["expected"] for record in records}) == 5
    assert sum(record["correct"] for record in records) >= 4, records


def test_a_missing_model_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="the embedded model is missing from"):
        embedded.model_path()
    result = CliRunner().invoke(main, ["ask"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the embedded model is missing from")
