"""`kv-integration train-router`: files it leaves, going on, and wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from small_model import make_folder
from transformers import AutoModelForCausalLM

from kv_integration import embedded, haystack
from kv_integration.cli import main
from kv_integration.cli.train_router import HELP
from kv_integration.router import Router
from kv_integration.router_training import Training, log

SMALL = (
    *("--steps", 3, "--batch", 1, "--lengths", "96,128", "--budgets", "0.4", "--window", 16),
    *("--min-length", 4, "--max-length", 16, "--candidates", 12, "--mined", 4, "--random", 2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("texts")
    for number, topic in enumerate(haystack.topics(held_out=False)[:3]):
        (into / f"{number}.txt").write_text(topic * 3, encoding="utf-8")
    (into / "short.txt").write_text("Nothing to learn from here.", encoding="utf-8")
    return into


def call(*arguments: object):
    return CliRunner().invoke(main, ["train-router", *map(str, arguments)])


def test_it_trains_a_router_that_the_model_loads(folder, texts, tmp_path):
    out = tmp_path / "new" / "router.safetensors"
    result = call("--model", folder, "--text", texts, "--out", out, *SMALL)
    assert result.exit_code == 0, result.output
    assert "parameters" in result.stdout and str(out) in result.stdout
    router = Router.load(out, model=AutoModelForCausalLM.from_pretrained(folder))
    assert bool(torch.isfinite(router.projections).all())
    run = out.with_name("router-run")
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoint.safetensors",
        "log.csv",
        "losses.png",
    ]
    assert len(log.read(run / "log.csv")) == 3
    first = out.read_bytes()
    out.unlink()
    assert call("--model", folder, "--text", texts, "--out", out, *SMALL).exit_code == 0
    assert out.read_bytes() == first  # from the finished run's checkpoint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--text", "none.txt"), "there is no text none.txt"),
        (("--text", "{folder}/config.json", "--lengths", "4000"), "too short to train on"),
        (("--text", "{folder}"), "there is no .txt file in"),
        (("--text", "{texts}", "--steps", "0"), "steps must be at least 1, got 0"),
        (("--text", "{texts}", "--lengths", "8,x"), "wanted ints with commas between, got '8,x'"),
        (("--text", "{texts}", "--lengths", "5000"), "within the model's 4096 positions, got 5000"),
        (("--text", "{texts}", "--out", "router.bin"), "--out must end with .safetensors"),
        (("--text", "{texts}", "--run", "{texts}/0.txt"), "--run is no folder"),
        (("--text", "{texts}", "--threads", "0"), "--threads must be at least 1"),
        ((), "Missing option '--text'"),
    ],
)
def test_wrong_input_is_one_line(folder, texts, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    given = [option.format(folder=folder, texts=texts) for option in options]
    out = [] if "--out" in given else ["--out", tmp_path / "r.safetensors"]
    result = call("--model", folder, *out, *given)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
    assert not list(tmp_path.glob("*"))


def test_every_setting_has_an_option():
    assert set(HELP) == set(Training().as_dict())
    text = call("--help").output
    assert all(f"--{name.replace('_', '-')}" in text for name in HELP)


def test_the_embedded_router_is_of_the_embedded_model(monkeypatch, tmp_path):
    path = embedded.router_path()
    assert path.stat().st_size < 2_000_000
    model = AutoModelForCausalLM.from_pretrained(embedded.model_path())
    router = Router.load(path, model=model)
    fresh = Router.for_model(model)
    assert not torch.equal(router.threshold_logits, fresh.threshold_logits)
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="router is missing"):
        embedded.router_path()
