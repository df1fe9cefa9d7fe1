"""The commands as a user meets them: output, JSON, files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from small_model import make_folder
from transformers import AutoTokenizer

from kv_integration import METHODS, ShadowKV, haystack
from kv_integration.cli import main

FIELDS = {
    "answer",
    "expected",
    "correct",
    "method",
    "budget",
    "prompt_tokens",
    "entries_attended",
    "device_bytes",
    "host_bytes",
    "full_kv_bytes",
    "ttft_s",
    "per_token_s",
}
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head size, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def small(folder: Path) -> list[str | Path]:
    return ["--model", folder, "--context", "300", "--max-new-tokens", "4"]


@pytest.mark.parametrize("method", ["dynamic", *METHODS])
def test_ask_json(folder: Path, method: str) -> None:
    result = run("ask", *small(folder), "--method", method, "--budget", "0.25", "--json")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert set(record) == FIELDS
    assert record["method"] == method
    prompt = haystack.needle_prompt(
        AutoTokenizer.from_pretrained(folder),
        context=300,
        depth=0.5,
        seed=0,
        keys=haystack.read_keys(folder),
    )
    assert record["prompt_tokens"] == len(prompt.ids)
    assert record["expected"] == prompt.expected
    found = re.search(r"\d+", record["answer"])
    assert record["correct"] is (found is not None and found[0] == record["expected"])
    # The last token is not fed back, so its keys and values do not exist.
    assert record["full_kv_bytes"] == TOKEN_BYTES * (record["prompt_tokens"] + 3)
    assert record["ttft_s"] > 0 and record["per_token_s"] > 0
    if method in ("dynamic", "full"):
        assert record["budget"] == 1.0
        assert record["entries_attended"] == record["prompt_tokens"]
        assert record["device_bytes"] >= record["full_kv_bytes"]
    else:
        assert record["budget"] == 0.25
        granted, attended = record["prompt_tokens"] // 4, record["entries_attended"]
        if method == "sekv":  # expands whole spans, and only those that a query looks for
            assert 0 < attended <= granted
        elif method.startswith("shadowkv"):  # attends whole chunks
            assert granted - ShadowKV().chunk < attended <= granted
        else:
            # the most of any layer: PyramidKV gives its first layers more than the mean
            assert attended == granted or method == "pyramidkv"


def test_an_integer_budget_counts_entries(folder: Path) -> None:
    record = json.loads(run("ask", *small(folder), "--budget", "50", "--json").stdout)
    assert record["budget"] == 50 and record["entries_attended"] == 50


def test_one_token_has_no_time_per_token(folder: Path) -> None:
    arguments = ["--model", folder, "--context", "200", "--max-new-tokens", "1"]
    assert json.loads(run("ask", *arguments, "--json").stdout)["per_token_s"] is None
    assert "each token after  -" in run("ask", *arguments).stdout
    assert run("compare", *arguments).exit_code == 0


def test_ask_for_people(folder: Path) -> None:
    result = run("ask", *small(folder), "--seed", "3")
    assert result.exit_code == 0
    for name in ("answer", "prompt", "attended", "on the device", "on the host", "first token"):
        assert re.search(rf"^{name} +\S", result.stdout, re.MULTILINE), name
    assert "a haystack of" in result.stderr and "seed 3" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_haystack_is_the_same_for_the_same_seed(folder: Path) -> None:
    outputs = [run("ask", *small(folder), "--seed", seed).stderr for seed in "001"]
    assert outputs[0] == outputs[1] != outputs[2]


def test_document_and_question(folder: Path, tmp_path: Path) -> None:
    document = tmp_path / "notes.txt"
    document.write_bytes("\ufeffThe café opens at nine. It closes late.\r\n".encode())
    asked = ("--document", document, "--question", "When?", "--model", folder)
    result = run("ask", *asked, "--max-new-tokens", "3", "--json")
    record = json.loads(result.stdout)
    assert record["expected"] is None and record["correct"] is None
    assert str(document) in result.stderr and "When?" in result.stderr
    assert "right" not in run("ask", *asked, "--max-new-tokens", "3").stdout


def test_compare_json_is_a_list_over_one_prompt(folder: Path) -> None:
    result = run("compare", *small(folder), "--budget", "0.2", "--json")
    assert result.exit_code == 0
    records = json.loads(result.stdout)
    assert [record["method"] for record in records] == ["dynamic", *METHODS]
    assert all(set(record) == FIELDS for record in records)
    assert len({(record["prompt_tokens"], record["expected"]) for record in records}) == 1
    by_name = {record["method"]: record for record in records}
    assert by_name["full"]["answer"] == by_name["dynamic"]["answer"]
    assert by_name["sentencekv"]["host_bytes"] > 0
    assert by_name["sablock"]["device_bytes"] < by_name["full"]["device_bytes"]


def test_compare_takes_methods_with_commas_or_one_by_one(folder: Path) -> None:
    named = run("compare", *small(folder), "--methods", "sablock, full", "--json").stdout
    apart = run(
        *("compare", *small(folder), "--methods", "sablock"),
        *("--methods", "full,sablock", "--json"),
    ).stdout
    for output in (named, apart):
        assert [record["method"] for record in json.loads(output)] == ["sablock", "full"]


def test_compare_writes_table_and_figure(folder: Path, tmp_path: Path) -> None:
    plot, out = tmp_path / "new" / "figure.png", tmp_path / "new" / "table.md"
    result = run("compare", *small(folder), "--plot", plot, "--out", out)
    assert result.exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    assert sorted(plot.parent.iterdir()) == [plot, out]
    lines = [line for line in out.read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 1 + len(METHODS)
    assert {line.count("|") for line in lines} == {9}
    assert "dynamic (transformers)" in lines[2]
    assert "seed 0" in out.read_text()
    for label in ("dynamic (transformers)", *METHODS, "wrong", "(1.00x)"):
        assert label in result.stdout


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_figures_in_other_formats(folder: Path, tmp_path: Path, suffix: str) -> None:
    plot = tmp_path / f"figure{suffix}"
    assert run("compare", *small(folder), "--methods", "full", "--plot", plot).exit_code == 0
    assert plot.read_bytes()[:5] in (b"<?xml", b"%PDF-")


@pytest.mark.parametrize("command", ["ask", "compare"])
def test_help_has_every_option_and_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0 and "Examples:" in result.stdout
    options = (
        "document question context depth seed model budget max-new-tokens dtype device threads"
    )
    options += " json" + (" methods plot out" if command == "compare" else " method")
    for option in options.split():
        assert f"--{option} " in result.stdout
    assert f"kv-integration {command} --document" in result.stdout


def test_version() -> None:
    assert re.fullmatch(r"kv-integration, version \d+\.\d+\.\d+\n", run("--version").stdout)
