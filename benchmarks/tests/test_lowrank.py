from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner, Result

from kv_bench import llama_layer
from kv_bench import lowrank as module
from kv_bench.lowrank import lowrank, natural_offsets

SMALL = "--tokens 300 --span-tokens 200 --heads 2 --size 16 --rank 8 --max-rank 8 --rounds 1"


@pytest.fixture(autouse=True)
def small_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer of 8 billion parameters' shape is too large for a test."""
    monkeypatch.setattr(llama_layer, "prefill_ms", lambda *args, **options: 1000.0)


def run(*more: str) -> Result:
    return CliRunner().invoke(lowrank, [*SMALL.split(), *more])


def test_rows_say_what_was_compared(tmp_path):
    file = tmp_path / "rows.json"
    result = run("--json", str(file))
    assert result.exit_code == 0, result.output
    table = json.loads(file.read_text())["rows"]
    assert [(row["case"].split(",")[0], row["beside"], row["wanted"]) for row in table] == [
        ("gram", "torch.linalg.svd", ">= 4"),
        ("gram", "torch.svd_lowrank", "> 1"),
        ("ShadowKV's factors of 300 tokens", "a layer's prefill", ">= 100 (1%)"),
        ("ShadowKV's factors of 300 tokens", "a layer's prefill", ">= 100 (1%)"),
        ("span_svd of keys", "a loop over spans", ">= 20"),
        ("span_svd of keys", "a loop over spans and heads", ">= 20"),
        ("span_svd of values", "a loop over spans", ">= 20"),
        ("span_svd of values", "a loop over spans and heads", ">= 20"),
    ]
    for row in table:
        assert row["ratio"] == row["ms"] / row["kv-lowrank ms"]


@pytest.mark.parametrize("name", ["truncated_svd", "span_svd", "unrotate"])
def test_a_wrong_result_gets_no_figure(monkeypatch, name):
    real = getattr(module, name)

    def wrong(*args, **options):
        result = real(*args, **options)
        if isinstance(result, torch.Tensor):
            return result * 1.1
        return result._replace(left=result.left * 1.1)

    monkeypatch.setattr(module, name, wrong)
    if name == "unrotate":  # scaled keys are not those that were rotated
        monkeypatch.setattr(module, "_truncated", lambda *args: [])
    result = run()
    assert result.exit_code == 1
    assert "no figure is given" in result.output
    assert "ratio" not in result.output


def test_a_wrong_spectrum_gets_no_figure(monkeypatch):
    real = module.span_svd

    def wrong(*args):
        spans = real(*args)
        return spans._replace(sigma=spans.sigma + 0.1, left=spans.left)

    monkeypatch.setattr(module, "span_svd", wrong)
    result = run()
    assert result.exit_code == 1 and "no figure is given" in result.output


@pytest.mark.parametrize("tokens", [1, 16, 500, 20000])
def test_natural_spans_cover_the_tokens(tokens):
    offsets = natural_offsets(tokens)
    lengths = offsets.diff()
    assert offsets[0] == 0 and offsets[-1] == tokens
    assert (lengths[:-1] >= 16).all() and (lengths > 0).all()
    assert torch.equal(offsets, natural_offsets(tokens))
