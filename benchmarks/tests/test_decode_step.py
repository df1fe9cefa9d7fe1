"""`kv-bench decode-step`: its columns, what it refuses, what it saves. Nothing here is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kv_bench import decode_step as module
from kv_bench.decode_cases import CASES
from kv_bench.decode_layer import Case, Layer
from kv_bench.decode_step import decode_step

COLUMNS = [
    "case",
    "context",
    "batch",
    "ms",
    "full_kv_ms",
    "ratio",
    "bytes",
    "copy_gb_s",
    "over_bound",
]


def run(*options: str) -> Result:
    small = ["--contexts", "10240", "--batches", "1", "--rounds", "1"]
    return CliRunner().invoke(decode_step, [*small, *options])


def test_every_case_gives_a_row(tmp_path: Path) -> None:
    """All cases agree with float64, in a batch of two; the file holds the columns promised."""
    file = tmp_path / "new" / "rows.json"
    result = run("--batches", "2", "--json", str(file))
    assert result.exit_code == 0, result.output
    saved = json.loads(file.read_text())
    assert [row["case"] for row in saved["rows"]] == list(CASES)
    for row in saved["rows"]:
        assert list(row) == COLUMNS
        assert (row["context"], row["batch"]) == (10240, 2)
        assert row["ratio"] == pytest.approx(row["full_kv_ms"] / row["ms"])
        bound = row["bytes"] / row["copy_gb_s"] / 1e6
        assert row["over_bound"] == pytest.approx(row["ms"] / bound)
        assert row["case"] in result.output
    assert {"date", "device", "torch", "threads"} <= set(saved["environment"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types(dtype: str) -> None:
    result = run("--dtype", dtype)
    assert result.exit_code == 0, result.output


def test_bytes_are_those_of_the_entries() -> None:
    """1,024 keys and values of 128 floats in each of 8 heads; a fifth of the prompt with sizes."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 8, 10240, 128)
    layer = Layer(torch.randn(1, 32, 1, 128), k, v)
    for name in ("tokens_1024", "selected_1024"):
        case = CASES[name](layer)
        assert case.read(case.pick()) == 2 * 8 * 1024 * 128 * 4
    merged = CASES["merged_20"](layer)
    assert merged.read(merged.pick()) == 8 * 2048 * (2 * 128 + 1) * 4


@pytest.mark.parametrize("case", [*CASES])
def test_a_wrong_result_gives_no_figure(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = CASES[case]

    def wrong(layer: Layer) -> Case:
        right = make(layer)
        return Case(right.pick, lambda picks: right.attend(picks) * 1.001, right.wanted, right.read)

    monkeypatch.setitem(CASES, case, wrong)
    monkeypatch.setattr(module, "full_kv", lambda layer, rounds: lambda: layer.q)
    result = run("--cases", case)
    assert result.exit_code == 1
    assert f"{case}: the results differ" in result.output
    assert "ratio" not in result.output


@pytest.mark.parametrize("case", ["sentence", "shadow", "sekv_10"])
def test_a_wrong_pick_gives_no_figure(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thing picked is swapped for one that is not, and attended rightly."""
    make = CASES[case]

    def wrong(layer: Layer) -> Case:
        right = make(layer)
        picks = right.pick()
        row = picks[0, 0]
        other = next(i for i in range(10**6) if i not in row)
        swapped = picks.clone()
        swapped[0, 0, 0] = other
        return Case(lambda: swapped, right.attend, right.wanted, right.read)

    monkeypatch.setitem(CASES, case, wrong)
    monkeypatch.setattr(module, "full_kv", lambda layer, rounds: lambda: layer.q)
    result = run("--cases", case)
    assert result.exit_code == 1
    assert f"{case} picked what its scores do not" in result.output


def test_a_wrong_full_result_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = module.scaled_dot_product_attention
    monkeypatch.setattr(
        module, "scaled_dot_product_attention", lambda *a, **kw: sdpa(*a, **kw) + 0.01
    )
    result = run("--cases", "tokens_1024")
    assert result.exit_code == 1
    assert "full KV, packed: the results differ" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "512"], "a context must be at least 10240 tokens, got 512"),
        (["--contexts", "16K"], "'16K' is no number of 1 or more"),
        (["--batches", "0"], "'0' is no number of 1 or more"),
        (["--cases", "tokens_1024,quest"], "'quest' is none of tokens_1024, selected_1024"),
        (["--dtype", "float64"], "'float64' is not one of"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to use")
def test_no_cuda_is_said() -> None:
    result = run("--device", "cuda")
    assert result.exit_code == 2
    assert "torch finds no CUDA device" in result.output
