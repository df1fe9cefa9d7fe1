"""`kv-bench speed` and `kv-bench memory`, small: columns, files, refusal of wrong results."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from kv_bench.cli import main
from kv_integration.layer import CompressedLayer

SPEED = ["speed", "--contexts", "96", "--rounds", "1", "--steps", "1", "--budget", "16"]
MEMORY = ["memory", "--context", "512", "--layers", "4", "--budget", "32"]


def test_speed_has_a_row_per_method_and_context(tmp_path):
    file = tmp_path / "speed.json"
    names = "full,sentencekv,semanticache,h2o"
    run = CliRunner().invoke(main, [*SPEED, "--methods", names, "--json", str(file)])
    assert run.exit_code == 0, run.output
    saved = json.loads(file.read_text())
    assert [row["case"] for row in saved["rows"]] == names.split(",")
    for row in saved["rows"]:
        assert row["context"] == 96
        assert row["ttft_ratio"] == pytest.approx(row["ttft_ms"] / row["dynamic_ttft_ms"])
        assert row["step_ratio"] == pytest.approx(row["step_ms"] / row["dynamic_step_ms"])
    assert {"date", "device", "torch", "threads"} <= saved["environment"].keys()


def test_speed_gives_no_figure_for_a_wrong_first_token(monkeypatch):
    monkeypatch.setattr(
        CompressedLayer, "_prefill", lambda self, q, k, v, exact: torch.zeros_like(q)
    )
    run = CliRunner().invoke(main, [*SPEED, "--methods", "snapkv"])
    assert run.exit_code != 0
    assert "snapkv, first token: the results differ" in run.output
    assert "ttft_ms" not in run.output


def test_memory_counts_what_stays_and_what_the_prefill_held(tmp_path):
    file = tmp_path / "memory.json"
    run = CliRunner().invoke(main, [*MEMORY, "--methods", "full,snapkv", "--json", str(file)])
    assert run.exit_code == 0, run.output
    full, snapkv = json.loads(file.read_text())["rows"]
    layer = 2 * 8 * 512 * 128 * 4 / 2**20
    assert full["layer_full_kv_mib"] == layer
    assert full["full_kv_mib"] == 4 * layer
    assert full["held_mib"] >= full["full_kv_mib"]
    assert snapkv["held_mib"] < full["held_mib"] / 4
    assert snapkv["peak_mib"] < full["peak_mib"]
    assert snapkv["peak_mib"] - snapkv["held_mib"] <= layer


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["speed", "--methods", "nothing"], "unknown method 'nothing'"),
        (["speed", "--budget", "0"], "budget"),
        (["speed", "--contexts", "many"], "--contexts must be positive integers"),
        (["memory", "--methods", "dynamic"], "unknown method 'dynamic'"),
        (["memory", "--budget", "ten"], "budget must be a number"),
    ],
)
def test_wrong_options_are_refused(options, text):
    run = CliRunner().invoke(main, options)
    assert run.exit_code == 2
    assert text in run.output
