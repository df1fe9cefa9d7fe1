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


def test_bytes_and_latency_of_a_whole_model(tmp_path):
    file = tmp_path / "rows.json"
    options = ["--shape", "qwen-14b", "--model-bytes", "--prefill", "--output", "100"]
    names = ["--methods", "full,sekv", "--budget", "0.3", "--dtype", "bfloat16", "--router"]
    result = run("--contexts", "400", *options, *names, "--json", str(file))
    assert result.exit_code == 0, result.output
    full, sekv = json.loads(file.read_text())["rows"]
    token = 192 * 2**10  # bytes in 48 layers, 8 KV heads of 128
    weights = 2 * 14_770_033_664  # Qwen2.5-14B-Instruct, as published
    for row in (full, sekv):
        assert row["full_cache_gib"] * 2**30 == pytest.approx(400 * token)
        assert row["full_total_gib"] * 2**30 == pytest.approx(400 * token + weights)
        held = 48 * row["device_mib"] + row["shared_mib"]
        assert row["cache_gib"] * 1024 == pytest.approx(held)
        assert row["total_gib"] - row["cache_gib"] == pytest.approx(weights / 2**30)
        assert row["total_below"] == pytest.approx(1 - row["total_gib"] / row["full_total_gib"])
        # a prefill of 1000 ms and a token of 1000 ms besides attention, in each layer
        seconds = 48 * (1 + row["compress_ms"] / 1e3 + 100 * (1 + row["step_ms"] / 1e3))
        assert row["latency_s"] == pytest.approx(seconds)
        assert row["tokens_per_s"] == pytest.approx(500 / seconds)
    assert sekv["cache_gib"] < full["cache_gib"]
    assert sekv["attended"] <= 120


def test_a_router_has_routing_keys_for_every_query_head(tmp_path):
    held = []
    for more in ([], ["--router"]):
        file = tmp_path / "rows.json"
        names = ["--methods", "sekv", "--budget", "0.3", "--contexts", "400"]
        assert run(*names, *more, "--json", str(file)).exit_code == 0
        held.append(json.loads(file.read_text())["rows"][0])
    assert held[0]["attended"] <= 120 and held[1]["attended"] <= 120
    assert held[0]["device_mib"] != held[1]["device_mib"]


def test_a_step_stands_beside_that_of_its_primitives(tmp_path):
    file = tmp_path / "rows.json"
    names = ["--methods", "sentencekv,shadowkv,sekv", "--contexts", "10240"]
    result = run(*names, "--primitive", "--alike", "0.9", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["attended"] for row in rows[:2]] == [1024, 2464]
    assert 900 <= rows[2]["attended"] <= 1024
    for row in rows:
        assert row["over_primitive"] == row["step_ms"] / row["primitive_ms"]


def test_queries_are_as_alike_as_they_are_asked_to_be():
    method = METHODS["full"]()
    for wanted in (0.0, 0.6, 1.0):
        prompt = module.Prompt(64, torch.float32, 0)
        row, plan = prompt.row(method), prompt.plan(method)
        run = module.Decoding(prompt, row, plan, method.compress([row], plan), wanted)
        seen = []
        for _ in range(40):
            seen.append(run.query.flatten())
            run.come()
        steps = torch.stack(seen)
        found = torch.cosine_similarity(steps[1:], steps[:-1], dim=1).mean()
        assert found.item() == pytest.approx(wanted, abs=0.02)
        assert steps.norm(dim=1) == pytest.approx(64.0, rel=0.1)  # 4,096 numbers of variance 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--primitive", "--methods", "sekv,quest"], "got quest"),
        (["--primitive", "--methods", "sekv", "--budget", "0.1"], "leave --budget out"),
        (["--primitive", "--methods", "sekv", "--shape", "qwen-14b"], "got qwen-14b"),
        (
            ["--primitive", "--methods", "sekv", "--contexts", "4096"],
            "wants 10240 tokens at least, got 4096",
        ),
        (["--alike", "1.5"], "1.5"),
        (["--methods", "dynamic"], "unknown method"),
        (["--budget", "0"], "budget as a number"),
        (["--output", "5"], "--output needs --prefill"),
    ],
)
def test_wrong_options_are_refused(options, text):
    result = run(*options)
    assert result.exit_code != 0 and text in str(result.output) + str(result.exception)
