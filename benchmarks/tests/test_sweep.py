"""`kv-bench sweep` and `kv-bench recompress`, small: which settings run, and what is counted."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kv_bench.cli import main
from kv_bench.sweep import settings


def test_one_option_at_a_time_or_all_combinations():
    vary = ["lam=0,1", "window=8"]
    methods = ["sablock(beta=2), snapkv"]
    assert settings(methods, vary, product=False) == [
        "sablock(beta=2)",
        "sablock(beta=2,lam=0)",
        "sablock(beta=2,lam=1)",
        "sablock(window=8,beta=2)",
        "snapkv",
        "snapkv(window=8)",
    ]
    assert settings(methods, vary, product=True) == [
        "sablock(beta=2)",
        "sablock(window=8,beta=2,lam=0)",
        "sablock(window=8,beta=2,lam=1)",
        "snapkv",
        "snapkv(window=8)",
    ]
    # what is given is replaced, and what comes out twice runs once
    assert settings(["sablock(lam=0)"], ["lam=0,1,0"], product=False) == [
        "sablock(lam=0)",
        "sablock(lam=1)",
    ]


SWEEP = ["sweep", "--contexts", "512", "--samples", "1", "--budgets", "0.1,1.0"]


def test_a_sweep_has_a_row_per_setting_and_budget(tmp_path):
    file = tmp_path / "sweep.json"
    options = ["--depths", "2", "--methods", "sablock", "--vary", "window=32", "--json", str(file)]
    run = CliRunner().invoke(main, [*SWEEP, *options])
    assert run.exit_code == 0, run.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["case"], row["budget"]) for row in rows] == [
        (name, budget) for name in ("sablock", "sablock(window=32)") for budget in (0.1, 1.0)
    ]
    for row in rows:
        assert row["512"] in (0, 0.5, 1) and row["mean"] == row["512"]
        if row["budget"] == 1.0:  # nothing is lost, and full KV finds nearly every needle
            assert row["512"] == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--methods", "snapkv", "--vary", "lam=0"],
            "no method has option 'lam'; known: budget, k",
        ),
        (["--methods", "sablock", "--vary", "lam"], "--vary must be an option and its values such"),
        (["--methods", "sablock", "--vary", "lam=a"], "lam of sablock must be float, got 'a'"),
        (["--methods", "sablock", "--vary", "max_block=0"], "max_block must be at least 1, got 0"),
        (["--methods", "magic", "--vary", "lam=0"], "unknown method 'magic'"),
        (["--methods", "sablock", "--vary", "lam=0", "--depths", "0"], "--depths must be at least"),
    ],
)
def test_wrong_options_are_refused(options, text):
    run = CliRunner().invoke(main, [*SWEEP, *options])
    assert run.exit_code == 2
    assert text in run.output


def test_memory_over_turns_with_and_without_compressing_again(tmp_path):
    file = tmp_path / "recompress.json"
    sizes = [
        "--budget",
        "32",
        "--context",
        "128",
        "--turns",
        "6",
        "--tokens",
        "64",
        "--after",
        "64",
    ]
    names = "full,streamingllm,snapkv"
    run = CliRunner().invoke(main, ["recompress", *sizes, "--methods", names, "--json", str(file)])
    assert run.exit_code == 0, run.output
    full, streaming, never, again = json.loads(file.read_text())["rows"]
    token = 4 * 2 * 2 * 64 * 4 / 1024  # KiB of a token in four layers
    assert full["full_kv_kib"] == (128 + 6 * 64) * token
    assert full["last_kib"] >= full["full_kv_kib"]
    assert streaming["last_kib"] == streaming["prompt_kib"] == 32 * token
    assert [never["recompress_after"], again["recompress_after"]] == ["never", "64"]
    assert never["last_kib"] >= (32 + 6 * 64) * token
    assert again["last_kib"] < never["last_kib"] / 1.5
