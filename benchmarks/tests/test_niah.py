"""The command on a small random model: files, resuming, wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from small_model import make_folder

from kv_bench import niah as module
from kv_bench.cli import main
from kv_bench.folder import fingerprint
from kv_bench.heatmap import draw
from kv_integration import haystack
from kv_integration.answer import run_method
from kv_integration.cli.inputs import load_model, make_method


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, ["niah", *(str(argument) for argument in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def small(folder: Path, out: Path) -> list[str | Path]:
    return [
        *("--model", folder, "--out", out, "--contexts", "100,160", "--depths", "2"),
        *("--samples", "3", "--batch", "2", "--budgets", "0.5,32"),
    ]


def test_files_and_summary(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(*small(folder, out), "--methods", "full,sablock,sentencekv")
    assert result.exit_code == 0, result.stderr
    records = json.loads((out / "results.json").read_text())
    variants = {("full", 1.0)} | {(m, b) for m in ("sablock", "sentencekv") for b in (0.5, 32)}
    assert {(r["method"], r["budget"], r["context"], r["depth"]) for r in records} == {
        (method, budget, context, depth)
        for method, budget in variants
        for context in (100, 160)
        for depth in (0.0, 1.0)
    }
    assert all(r["samples"] == 3 and 0 <= r["accuracy"] <= 1 for r in records)
    maps = {path.name for path in out.glob("*.png")}
    assert maps == {
        "niah-full.png",
        *(f"niah-{m}-{b}.png" for m in ("sablock", "sentencekv") for b in ("0.5", "32")),
    }
    assert {path.name for path in out.iterdir()} == maps | {
        "results.csv",
        "results.json",
        "settings.json",
    }
    for method, budget in variants:
        assert any(line.split()[:2] == [method, str(budget)] for line in result.stdout.splitlines())


def test_accuracy_is_that_of_asking_each_prompt_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A random model finds no needle: call an answer right when its text is of even length.
    monkeypatch.setattr(module, "is_correct", lambda answer, expected: len(answer) % 2 == 0)
    run(*small(folder, tmp_path / "out"), "--contexts", "100", "--budgets", "0.5")
    loaded = load_model(folder, dtype="auto", device="cpu")
    for record in json.loads((tmp_path / "out" / "results.json").read_text()):
        prompts = module.make_prompts(loaded, None, record["context"], record["depth"], 3, 0)
        method = make_method(record["method"], record["budget"])
        texts = [
            run_method(loaded.model, loaded.tokenizer, prompt.ids, method, max_new_tokens=12).answer
            for prompt in prompts
        ]
        assert record["accuracy"] == pytest.approx(sum(len(t) % 2 == 0 for t in texts) / 3)


def test_a_second_call_adds_only_what_is_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, list[str]]] = []
    original = module.count_right

    def counting(loaded, prompts, variants, max_new_tokens):
        asked.append((len(prompts), [variant.label for variant in variants]))
        return original(loaded, prompts, variants, max_new_tokens)

    monkeypatch.setattr(module, "count_right", counting)
    base = small(folder, tmp_path)
    run(*base, "--methods", "full")
    assert asked == [(2, ["full"]), (1, ["full"])] * 4
    before = json.loads((tmp_path / "results.json").read_text())
    asked.clear()
    run(*base, "--methods", "full,sablock")
    assert asked == [(2, ["sablock-0.5", "sablock-32"]), (1, ["sablock-0.5", "sablock-32"])] * 4
    after = json.loads((tmp_path / "results.json").read_text())
    assert [record for record in after if record["method"] == "full"] == before
    asked.clear()
    run(*base, "--methods", "full,sablock")
    assert asked == []


def test_a_method_with_options_meets_every_budget_but_its_own() -> None:
    names = ["full", "sablock(lam=0)", "h2o(budget=7)", "semanticache(theta=0.5)"]
    variants = module.make_variants(names, "0.1,32")
    assert [(v.method, v.budget) for v in variants] == [
        ("full", 1.0),
        ("sablock(lam=0)", 0.1),
        ("sablock(lam=0)", 32),
        ("h2o(budget=7)", 7),
        ("semanticache(theta=0.5)", 1.0),
    ]
    assert [v.stem for v in variants[:2]] == ["full", "sablock-lam-0-0.1"]


def test_prompts_differ_between_samples_and_agree_between_runs(folder: Path) -> None:
    loaded = load_model(folder, dtype="auto", device="cpu")
    prompts = module.make_prompts(loaded, None, 150, 0.5, 5, 0)
    assert len({tuple(prompt.ids) for prompt in prompts}) == 5
    assert module.make_prompts(loaded, None, 150, 0.5, 5, 0) == prompts
    assert module.make_prompts(loaded, None, 150, 0.5, 5, 1) != prompts


def test_any_text_is_a_haystack(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "novel.txt"
    text.write_text("It was a bright cold day. " * 50)
    base = [*small(folder, tmp_path / "out"), "--methods", "full", "--haystack", text]
    assert run(*base).exit_code == 0
    text.write_text("It was a dark warm night. " * 50)
    assert "holds results with haystack" in run(*base).stderr
    loaded = load_model(folder, dtype="auto", device="cpu")
    prompt = module.make_prompts(loaded, text.read_text(), 150, 0.5, 1, 0)[0]
    assert "dark warm night" in loaded.tokenizer.decode(prompt.ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "dynamic"], "unknown method 'dynamic'; wanted one of full,"),
        (["--methods", "magic"], "unknown method 'magic'"),
        (["--methods", "sablock(lamb=0)"], "sablock has no option 'lamb'; its options: budget"),
        (["--contexts", "512,x"], "--contexts must be positive integers"),
        (["--contexts", ""], "--contexts must be positive integers"),
        (["--contexts", "0"], "--contexts must be positive integers"),
        (["--contexts", "10"], "context is 10 tokens, but needle and question alone take"),
        (["--contexts", "100,5000"], "more than the model's 4096 positions"),
        (["--budgets", "1.5"], "in (0, 1], got 1.5"),
        (["--budgets", "0"], "at least 1, got 0"),
        (["--budgets", ","], "--budgets must name at least one budget"),
        (["--depths", "0"], "--depths must be at least 1, got 0"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--haystack", "missing.txt"], "there is no haystack missing.txt"),
        (["--model", "missing"], "there is no model folder missing"),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_input(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(*small(folder, tmp_path / "out"), *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and message in result.stderr
    assert not (tmp_path / "out" / "results.csv").exists()


def test_out_must_be_named_and_no_file(folder: Path, tmp_path: Path) -> None:
    assert "Missing option '--out'" in run().stderr
    (tmp_path / "out").write_text("")
    assert "--out is a file" in run(*small(folder, tmp_path / "out")).stderr


def test_an_interrupted_run_keeps_whole_cells_and_goes_on(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    out = tmp_path / "out"
    base = [
        *("--model", model, "--out", out, "--methods", "full", "--contexts", "100,110,120,3000"),
        *("--depths", "1", "--batch", "1"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "kv_bench", "niah", *base, "--samples", "30"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a test run in the background ignores it, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 240
    while not (out / "results.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.strip() == "error: interrupted"
    assert {path.name for path in out.iterdir()} == {"settings.json", "results.csv", "results.json"}
    records = json.loads((out / "results.json").read_text())
    assert records and all(record["samples"] == 30 for record in records)
    assert 3000 not in {record["context"] for record in records}
    assert run(*base, "--samples", "30", "--contexts", "100,110").exit_code == 0
    again = json.loads((out / "results.json").read_text())
    assert [record for record in again if record in records] == records
    assert {record["context"] for record in again} >= {100, 110}


def test_places_of_the_needle() -> None:
    assert module.places_of(1) == [0.5]
    assert module.places_of(5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_fingerprint_sees_retrained_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    before = fingerprint(folder)
    assert fingerprint(make_folder(tmp_path / "same")) == before
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(bytes(data))
    assert fingerprint(folder) != before


def test_heat_map_with_holes(tmp_path: Path) -> None:
    rows = [
        module.Row("full", context, depth, 1.0, 4, 0.5)
        for context, depth in ((512, 0.0), (512, 1.0), (2048, 0.5))
    ]
    draw(rows, "full", tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_default_haystack_is_held_out(folder: Path) -> None:
    loaded = load_model(folder, dtype="auto", device="cpu")
    prompt = module.make_prompts(loaded, None, 400, 0.0, 1, 0)[0]
    text = loaded.tokenizer.decode(prompt.ids)
    middle = text[len(text) // 2 :][:60]
    assert middle in "\n\n".join(haystack.topics(held_out=True))
