from __future__ import annotations

import itertools
import json

import pytest
import torch
from click.testing import CliRunner

import kv_bench.offload as module
from kv_bench.offload import make_trace, offload
from kv_offload import HitCache, TieredStore

SMALL = [
    *("--tokens", "64", "--selected", "20", "--heads", "2", "--head-size", "8"),
    *("--steps", "40", "--file-mib", "2", "--rounds", "1"),
]


def run(*options):
    return CliRunner().invoke(offload, [*SMALL, *options])


def test_rows_state_what_was_measured_and_what_is_wanted(tmp_path):
    result = run("--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [next(iter(row)) for row in rows] == ["case"] * 3
    gather, trace, opening = rows
    assert gather["case"] == "gather 20 of 64 tokens x 2 heads x 8"
    assert gather["ratio"] == pytest.approx(gather["other"] / gather["kv-offload"])
    asked = 40 * 20 * 2 * 8 * 2
    assert trace["other"] == pytest.approx(asked / 1e6)
    assert trace["ratio"] == pytest.approx((1 + 39 * 0.4) / 40)
    assert opening["other"] == pytest.approx(2 * 1.048576, rel=1e-3)
    assert opening["ratio"] == pytest.approx(opening["kv-offload"] / opening["other"], rel=1e-6)
    for row in rows:
        assert row["case"] in result.output and row["wanted"] in result.output


@pytest.mark.parametrize("repetition", [0.0, 0.6, 1.0])
def test_each_step_repeats_just_that_share_of_the_one_before(repetition):
    trace = make_trace(200, 50, 3, 5, repetition)
    for indices in trace:
        assert indices.shape == (1, 3, 50)
        assert bool((indices.diff(dim=-1) > 0).all())
        assert bool((indices >= 0).all()) and bool((indices < 200).all())
    for last, now in itertools.pairwise(trace):
        for head in range(3):
            assert torch.isin(now[0, head], last[0, head]).sum() == round(repetition * 50)


def test_wrong_rows_are_refused(monkeypatch):
    gather = TieredStore.gather
    monkeypatch.setattr(TieredStore, "gather", lambda *a, **k: gather(*a, **k) + 1)
    result = run()
    assert result.exit_code == 1
    assert "gather 20 of 64 tokens x 2 heads x 8: the results differ; no figure" in result.output


def test_wrong_rows_of_the_hit_cache_are_refused(monkeypatch):
    fetch = HitCache.fetch
    monkeypatch.setattr(HitCache, "fetch", lambda *a: fetch(*a) + 1)
    result = run()
    assert result.exit_code == 1
    assert "40 steps of a trace, hit cache: the results differ; no figure" in result.output


def test_counts_that_do_not_add_up_are_refused(monkeypatch):
    monkeypatch.setattr(HitCache, "bytes_moved", property(lambda cache: 0))
    result = run()
    assert result.exit_code == 1
    assert "the counts do not add up; no figure is given" in result.output


def test_a_file_that_gives_other_rows_is_refused(monkeypatch):
    save = module.save_cache

    def save_another(path, tensors, **options):
        save(path, {name: tensor + 1 for name, tensor in tensors.items()}, **options)

    monkeypatch.setattr(module, "save_cache", save_another)
    result = run()
    assert result.exit_code == 1
    assert "open a cache file of 2 MiB: the results differ; no figure" in result.output


def test_an_opening_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(module, "OPEN", "raise SystemExit('no such luck')")
    result = run()
    assert result.exit_code == 1
    assert "open a cache file of 2 MiB: no such luck" in result.output


def test_too_few_tokens_are_refused():
    result = run("--tokens", "27")
    assert result.exit_code == 1
    assert "--tokens 27 is too few: two steps of the trace select up to 28" in result.output
