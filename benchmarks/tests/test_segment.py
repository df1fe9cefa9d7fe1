from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kv_bench import segment as module
from kv_bench.segment import segment


def run(*more: str | Path) -> Result:
    small = ("--tokens", "3000", "--characters", "4000", "--rounds", "1")
    return CliRunner().invoke(segment, [*small, *map(str, more)])


def test_rows_say_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run("--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        "by_delimiters, 3000 tokens",
        "by_punctuation, 3000 tokens",
        "fixed, 3000 tokens",
        "by_surprisal, 3000 tokens",
        "sentences, Punkt untrained, a list of spans, 4000 characters",
        "sentences, Punkt untrained, an array of spans, 4000 characters",
        "sentences, Punkt trained on the text, a list of spans, 4000 characters",
    ]
    for row in rows[:4]:
        assert row["tokens/s"] > 0
        assert (row["wanted tokens/s"], row["wanted bytes"]) == (">= 5,000,000", "<= 2")
    for row in rows[4:]:
        assert row["ratio"] == row["NLTK ms"] / row["kv-segment ms"]
        assert row["wanted"] == ">= 0.9"
    assert "by_surprisal, 3000 tokens" in result.output


def test_memory_is_counted_beyond_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that holds five numbers of eight bytes per token shows forty."""
    real = module.fixed

    def wasteful(n: int, size: int) -> np.ndarray:
        np.zeros(5 * n, dtype=np.int64)
        return real(n, size)

    monkeypatch.setattr(module, "fixed", wasteful)
    row = next(row for row in module._arrays(100_000, 1) if row["case"].startswith("fixed"))
    assert row["temporary bytes/token"] == pytest.approx(40, abs=1)


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One sentence. Another one! " * 3, encoding="utf-8")
    assert run("--text", file).exit_code == 0
    result = run("--text", tmp_path / "absent.txt")
    assert isinstance(result.exception, ValueError)
    assert "there is no text" in str(result.exception)


@pytest.mark.parametrize("name", ["by_delimiters", "by_punctuation", "fixed", "sentences"])
def test_a_wrong_result_gets_no_figure(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: real(*args, **options)[1:])
    result = run()
    assert result.exit_code == 1
    assert f"{name}, " in result.output and "no figure is given" in result.output


def test_wrong_spans_get_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.by_surprisal
    monkeypatch.setattr(module, "by_surprisal", lambda h, alpha, size: real(h, alpha, size + 9))
    result = run()
    assert result.exit_code == 1
    assert "by_surprisal, 3000 tokens: the results differ; no figure is given" in result.output
