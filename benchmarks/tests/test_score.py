from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kv_bench import score as module
from kv_bench.score import score

SMALL = (
    "--keys 600 --window 5 --accumulated 300 --heads 4 --kv-heads 2 --size 8 "
    "--positions 1500 --vocabulary 5000 --hidden 8 --rounds 1 --threads 1"
)


def run(*more: str | Path) -> Result:
    return CliRunner().invoke(score, [*SMALL.split(), *map(str, more)])


def test_rows_say_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run("--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["case"], row["beside"], row["wanted"]) for row in rows] == [
        ("window_attention, 5 over 600, float32", "input + output", "< 1.25"),
        ("window_attention, 5 over 600, bfloat16", "input + output", "< 1.25"),
        ("accumulated_attention, 300, float32", "the whole matrix", "< 1"),
        ("surprisal, 1500 x 5000 words, float32", "one chunk of logits", "< 1"),
        ("surprisal, 1500 x 5000 words, bfloat16", "one chunk of logits", "< 1"),
    ]
    sizes = [row["MiB"] * 2**20 for row in rows]
    window = 5 * 4 * 8 + 600 * 2 * 8  # queries and keys; the result is float32 always
    assert sizes == [
        4 * window + 4 * 4 * 595,
        2 * window + 4 * 4 * 595,
        4 * 4 * 300 * 300,
        4 * 1024 * 5000,
        2 * 1024 * 5000,
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["held MiB"] / row["MiB"])
        assert row["held MiB"] > 0 and row["kv-score ms"] > 0
    for row in rows[:3]:
        assert row["times as fast"] == row["plain softmax ms"] / row["kv-score ms"]
    # A window's input is part of what is held; nothing holds less.
    assert all(row["ratio"] >= 1 for row in rows[:2])


@pytest.mark.parametrize("name", ["window_attention", "accumulated_attention", "surprisal"])
def test_a_wrong_result_gets_no_figure(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: real(*args, **options) * 1.1)
    result = run()
    assert result.exit_code == 1
    assert f"{name}, " in result.output and "no figure is given" in result.output


def test_logits_held_twice_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is measured: a surprisal that holds all logits stands out."""
    real = module.surprisal

    def wasteful(states, words, ids, chunk):
        logits = states[0] @ words.mT
        return real(states, words, ids, chunk=chunk) + 0 * logits[0, 0]

    monkeypatch.setattr(module, "surprisal", wasteful)
    rows: list[dict] = []
    monkeypatch.setattr(module, "publish", lambda table, file: rows.extend(table))
    result = run()
    assert result.exit_code == 0, result.output
    assert all(row["ratio"] > 1.4 for row in rows[3:])
