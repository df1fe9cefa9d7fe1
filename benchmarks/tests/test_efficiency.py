"""`kv-bench efficiency`, small: rows per batch, synthetic caches, memory limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from small_model import make_model, make_tokenizer
from transformers import DynamicCache

from kv_bench import synthetic
from kv_bench.cli import main
from kv_integration import FullKV, SeKV, SentenceKV, SnapKV, attach

TOKENIZER = make_tokenizer()


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["efficiency", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_model(len(TOKENIZER)).config.save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_a_row_per_method_context_and_batch(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--config", config, "--contexts", "200", "--prefill-up-to", "200", "--json", file]
    options += ["--methods", "snapkv", "--budget", "16", "--steps", "2", "--max-batch", "2"]
    result = run(*options, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["context"], row["case"], row["batch"]) for row in rows] == [
        (200, case, batch) for case in ("dynamic", "snapkv") for batch in (1, 2)
    ]
    for row in rows:
        prefill = row["batch"] == 1
        assert row["source"] == ("prefill" if prefill else "synthetic")
        assert (row["ttft_ms"] is not None) == prefill
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["tpot_ms"])
        assert row["device_peak_mib"] > 0
        # two layers, two KV heads of 8, float32; 3 tokens were decoded
        tokens = row["context"] + 3
        assert row["full_kv_mib"] * 2**20 == 2 * 2 * 2 * 8 * 4 * tokens * row["batch"]
    held = {(r["context"], r["case"], r["batch"]): r["device_mib"] for r in rows}
    assert held[200, "snapkv", 2] < held[200, "dynamic", 2] / 2


def test_batches_stop_where_memory_ends(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--config", config, "--contexts", "512", "--prefill-up-to", "1", "--json", file]
    options += ["--methods", "snapkv", "--budget", "16", "--steps", "2", "--max-batch", "64"]
    assert run(*options, "--dtype", "float32", "--memory", 2**-12).exit_code == 0  # 0.25 MiB
    rows = json.loads(file.read_text())["rows"]
    for case in ("dynamic", "snapkv"):
        own = [row for row in rows if row["case"] == case]
        assert "more than" in own[-1]["note"] and own[-1]["batch"] < 64
        assert all(row["device_peak_mib"] <= 0.25 for row in own[:-1])
    assert len(rows) > 2  # more than the two refusals


def test_a_model_that_a_synthetic_cache_does_not_serve_says_so(
    config: Path, tmp_path: Path
) -> None:
    layers = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "sliding_window": 16}
    layers |= {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | layers))
    file = tmp_path / "rows.json"
    options = ["--config", config, "--contexts", "90", "--prefill-up-to", "90", "--json", file]
    options += ["--methods", "snapkv", "--budget", "16", "--steps", "2", "--max-batch", "2"]
    assert run(*options, "--dtype", "float32").exit_code == 0
    rows = {(row["case"], row["batch"]): row for row in json.loads(file.read_text())["rows"]}
    assert rows["snapkv", 1]["source"] == "prefill" and "tpot_ms" in rows["snapkv", 1]
    assert "sliding-window" in rows["snapkv", 2]["note"]


@pytest.mark.parametrize("method", [FullKV(), SnapKV(budget=20), SentenceKV(budget=20)])
def test_a_synthetic_cache_holds_what_a_prompt_would_leave(method) -> None:
    model = make_model(len(TOKENIZER))
    with attach(model, TOKENIZER) as kv, torch.no_grad():
        made, real = kv.cache(method), kv.cache(method)
        synthetic.fill(model, made, batch=2, tokens=90)
        model(torch.randint(3, 400, (2, 90)), past_key_values=real)
        for cache in (made, real):
            model(torch.tensor([[5], [6]]), past_key_values=cache)
        ours, theirs = made.report(), real.report()
    assert (ours.tokens_seen, ours.full_kv_bytes) == (theirs.tokens_seen, theirs.full_kv_bytes)
    assert ours.entries_attended == theirs.entries_attended
    assert (ours.host_bytes > 0) == (theirs.host_bytes > 0)


def test_a_synthetic_cache_draws_the_surprisal_that_a_method_needs() -> None:
    model = make_model(len(TOKENIZER))
    with attach(model, TOKENIZER) as kv, torch.no_grad():
        made = [kv.cache(SeKV(budget=70)) for _ in range(2)]
        for cache in made:
            synthetic.fill(model, cache, batch=2, tokens=90)
        logits = [model(torch.tensor([[5], [6]]), past_key_values=c).logits for c in made]
        reports = [cache.report() for cache in made]
    assert torch.equal(*logits)  # one seed, one cache
    assert reports[0] == reports[1]
    assert reports[0].tokens_seen == 91 and reports[0].host_bytes > 0
    assert 0 < reports[0].entries_attended <= 70


def test_full_kv_attends_to_all_of_a_synthetic_cache() -> None:
    model = make_model(len(TOKENIZER))
    plain = synthetic.fill(model, DynamicCache(config=model.config), batch=1, tokens=50)
    token = torch.tensor([[7]])
    with torch.no_grad():
        wanted = model(token, past_key_values=plain).logits
        with attach(model, TOKENIZER) as kv:
            cache = kv.cache(FullKV())
            cache.enter(torch.zeros(1, 50, dtype=torch.int64), None)
            for layer, other in zip(cache.compressed, plain.layers, strict=True):
                keys, values = other.keys[:, :, :50], other.values[:, :, :50]
                layer.attend(
                    keys.repeat_interleave(2, 1),
                    keys,
                    values,
                    scale=8**-0.5,
                    exact=lambda q, k, v: q,
                )
            assert torch.allclose(model(token, past_key_values=cache).logits, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "missing.json"], "there is no config missing.json"),
        (["--methods", "magic"], "unknown method 'magic'"),
        (["--contexts", "many"], "--contexts must be positive integers"),
        (["--memory", "0"], "Invalid value for '--memory'"),
    ],
)
def test_wrong_input(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output
