from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner, Result

from kv_bench import llama_layer
from kv_bench import methods_step as module
from kv_bench.methods_step import methods_step
from kv_integration import METHODS

MIB = 2**20


@pytest.fixture(autouse=True)
def small_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole layer of 8 billion parameters' shape is too large for a test."""
    monkeypatch.setattr(llama_layer, "prefill_ms", lambda *args, **options: 1000.0)


def run(*more: str) -> Result:
    return CliRunner().invoke(methods_step, ["--rounds", "1", *more])


def test_rows_count_tensors_that_exist(tmp_path):
    file = tmp_path / "rows.json"
    result = run("--contexts", "600", "--budget", "160", "--prefill", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["sentencekv", "shadowkv", "shadowkvplus"]
    for row in rows.values():
        assert row["context"] == 600 and 120 <= row["attended"] <= 160
        assert row["full_kv_mib"] == 2 * 8 * 600 * 128 * 4 / MIB
        held = row["device_mib"] + row["shared_mib"] / 32
        assert row["times_below"] == pytest.approx(row["full_kv_mib"] / held)
        assert row["ratio"] == row["full_kv_ms"] / row["step_ms"]
        assert row["added"] == row["compress_ms"] / 1000
    # 568 tokens in 71 chunks: left, right, landmarks; outliers, window and room; what is resident
    shadow = rows["shadowkv"]
    factors = 4 * (568 * 160 + 160 * 1024 + 71 * 1024)
    assert factors / MIB <= shadow["device_mib"] <= factors / MIB + 3.0
    assert shadow["host_mib"] == pytest.approx(4 * 568 * 1024 / MIB, rel=0.02)
    assert shadow["shared_mib"] == 2 * 600 * 128 * 4 / MIB


@pytest.mark.parametrize("name", ["full", "snapkv", "semanticache", "streamingllm"])
def test_any_method_of_ours_can_be_measured(name):
    result = run("--contexts", "300", "--methods", name, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert f"| {name}" in result.output


def test_a_wrong_step_gets_no_figure(monkeypatch):
    class Wrong(METHODS["full"]):
        def compress(self, rows, plan):
            state = super().compress(rows, plan)
            step = state.step
            state.step = lambda *args, **options: 1.1 * step(*args, **options)
            return state

    monkeypatch.setitem(METHODS, "full", Wrong)
    result = run("--contexts", "300", "--methods", "full")
    assert result.exit_code == 1 and "no figure is given" in result.output
    assert "ratio" not in result.output


def test_keys_have_the_rank_that_factors_hold():
    prompt = module.Prompt(400, torch.float32, 0)
    row = prompt.row(METHODS["shadowkv"]())
    plain = module.rotate(prompt.keys, row.rope.cos, -row.rope.sin)
    joint = plain.transpose(1, 2).flatten(2)[0]
    sigma = torch.linalg.svdvals(joint)
    assert sigma[module.RANK - 1] > 0.01 * sigma[0] > 100 * sigma[module.RANK]


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--methods", "dynamic"], "unknown method"), (["--budget", "0"], "budget as a number")],
)
def test_wrong_options_are_refused(options, text):
    result = run(*options)
    assert result.exit_code != 0 and text in str(result.output) + str(result.exception)
