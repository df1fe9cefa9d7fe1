"""Budgets for equal device bytes, and SeKV's zoom-in rates, on a small random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kv_bench import matched, zoom
from kv_bench.cli import main
from kv_bench.grid import Variant
from kv_bench.niah import make_prompts
from kv_integration.answer import run_method
from kv_integration.cli.inputs import load_model, make_method

SEKV = "sekv(window=8,sinks=1,min_length=4,max_length=16,max_rank=4,routing_dim=4)"


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def niah(folder: Path, out: Path, methods: str, *more: str) -> Result:
    sizes = ["--contexts", "160", "--depths", "1", "--samples", "1", "--max-new-tokens", "3"]
    options = ["--model", folder, "--out", out, "--methods", methods, "--match", "device"]
    return run("niah", *options, *sizes, *more)


def test_budgets_keep_the_share_and_what_cannot_is_said(folder: Path, tmp_path: Path) -> None:
    result = niah(folder, tmp_path, f"full,snapkv(window=8),{SEKV}", "--budgets", "0.02,0.6")
    assert result.exit_code == 0, result.stderr
    found = {
        (m["method"], m["share"]): m for m in json.loads((tmp_path / matched.FILE).read_text())
    }
    assert {share for _, share in found} == {0.02, 0.6, 1.0}
    rows = json.loads((tmp_path / "results.json").read_text())
    assert {(r["method"], r["budget"]) for r in rows} == {
        key for key, match in found.items() if match["entries"] is not None
    }
    loaded = load_model(folder, dtype="auto", device="cpu")
    prompt = make_prompts(loaded, None, 160, 0.5, 1, 0)[0]
    for (name, share), match in found.items():
        assert match["context"] == 160
        if share == 0.02:
            assert match["entries"] is None and match["reached"] > share
            continue
        method = make_method(name, 1.0 if name == "full" else match["entries"])
        answer = run_method(loaded.model, loaded.tokenizer, prompt.ids, method, max_new_tokens=3)
        held = answer.device_bytes / answer.full_kv_bytes
        assert match["reached"] == pytest.approx(held, rel=0.1)
        assert name == "full" or share - 0.05 < match["reached"] <= share
    line = next(
        line
        for line in result.stdout.splitlines()
        if line.split()[:2] == ["snapkv(window=8)", "0.02"]
    )
    assert line.split()[-1] == "-"


def test_budgets_found_are_not_looked_for_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    niah(folder, tmp_path, "snapkv(window=8)", "--budgets", "0.5")
    before = (tmp_path / matched.FILE).read_text()
    monkeypatch.setattr(matched, "find", None)
    assert niah(folder, tmp_path, "snapkv(window=8)", "--budgets", "0.5").exit_code == 0
    assert (tmp_path / matched.FILE).read_text() == before
    # what a budget means is one thing in one folder
    assert (
        "holds results with benchmark"
        in niah(folder, tmp_path, "full", "--match", "entries").stderr
    )


@pytest.mark.parametrize(
    ("methods", "budgets", "message"),
    [
        ("snapkv", "0.1,32", "--match device wants shares of full KV in (0, 1] as budgets, got 32"),
        ("snapkv(budget=0.2)", "0.1", "but it is in snapkv(budget=0.2)"),
    ],
)
def test_budgets_that_are_no_shares(
    folder: Path, tmp_path: Path, methods: str, budgets: str, message: str
) -> None:
    result = niah(folder, tmp_path, methods, "--budgets", budgets)
    assert result.exit_code == 2 and message in result.stderr
    assert not (tmp_path / matched.FILE).exists()


def test_a_damaged_list_of_budgets_is_named(tmp_path: Path) -> None:
    (tmp_path / matched.FILE).write_text('[{"method": "snapkv"}]')
    with pytest.raises(ValueError, match=r"budgets\.json is no list of budgets"):
        matched.read(tmp_path / matched.FILE)


def test_variants_run_with_the_entries_found() -> None:
    full, snap = Variant("full", 1.0), Variant("snapkv", 0.1)
    found = {
        (snap.label, 100): matched.Match("snapkv", 100, 0.1, None, 0.3),
        (snap.label, 900): matched.Match("snapkv", 900, 0.1, 77, 0.09),
    }
    assert matched.as_run([full, snap], [100, 900], found) == {
        ("full", 100): full,
        ("full", 900): full,
        (snap.label, 900): Variant("snapkv", 77),
    }
    assert matched.as_run([snap], [100], None) == {(snap.label, 100): snap}


def test_ablations_run_from_the_embedded_router(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    base = "sekv(router=embedded,window=16,max_length=32)"
    changes = ["segmentation=fixed", "anchors=False", "weights=uniform", "router=None"]
    changes += ["max_rank=0,8", "threshold=0.05", "alpha=2", "window=8"]
    vary = [word for change in changes for word in ("--vary", change)]
    sizes = ["--contexts", "512", "--depths", "1", "--samples", "1", "--budgets", "0.3"]
    result = run("sweep", "--methods", base, *vary, *sizes, "--json", file)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 10 and all(row["512"] in (0, 1) for row in rows)


def test_zoom_in_rates_are_those_of_the_report(folder: Path, tmp_path: Path) -> None:
    file, plot = tmp_path / "zoom.json", tmp_path / "zoom.png"
    sizes = ["--contexts", "160", "--depths", "2", "--samples", "1", "--budget", "0.5"]
    options = ["--method", SEKV, "--model", folder, "--json", file, "--plot", plot]
    assert run("zoom", *options, *sizes).exit_code == 0
    saved = json.loads(file.read_text())
    assert saved["prompts"] == 2 and plot.read_bytes().startswith(b"\x89PNG")
    loaded = load_model(folder, dtype="auto", device="cpu")
    method = make_method(SEKV, 0.5)
    with zoom.attach(loaded.model, loaded.tokenizer) as kv:
        each = [
            zoom.zoom_in(
                kv, loaded, method, [make_prompts(loaded, None, 160, depth, 1, 0)[0].ids], 4
            )
            for depth in (0.0, 1.0)
        ]
    mean = (each[0] + each[1]) / 2
    for row, layer, rates in zip(saved["rows"], mean, saved["rates"], strict=True):
        assert rates == pytest.approx(layer.tolist())
        assert len(rates) == 4 and 0 <= row["least"] <= row["mean"] <= row["most"] <= 1
    assert mean.max() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "snapkv"], "snapkv reports no zoom-in rates; wanted sekv"),
        (["--method", "dynamic"], "unknown method 'dynamic'"),
        (["--plot", "zoom.pdf"], "--plot must end with .png"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
    ],
)
def test_wrong_zoom(folder: Path, arguments: list[str], message: str) -> None:
    sizes = ["--contexts", "160", "--depths", "1", "--samples", "1", "--budget", "0.5"]
    result = run("zoom", "--model", folder, *sizes, *arguments)
    assert result.exit_code == 2 and message in result.stderr
