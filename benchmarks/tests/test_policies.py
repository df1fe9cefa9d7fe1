from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kv_bench import policies as module
from kv_bench import sequential
from kv_bench.policies import policies


def run(*more: str | Path) -> Result:
    small = ("--tokens", "400", "--kv-heads", "2", "--head-size", "16", "--rounds", "1")
    return CliRunner().invoke(policies, [*small, *map(str, more)])


def test_rows_say_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run("--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"].rsplit(", ", 2)[0] for row in rows] == [
        "greedy_clusters, delimiter chunks",
        "greedy_clusters, sentences",
        "adaptive_blocks, 1 head",
        "adaptive_blocks, 2 heads",
    ]
    for row in rows:
        assert row["case"] in result.output.replace("\n", " ")
        ways = ["torch rows", "numpy rows", "numpy segments"]
        if row["case"].startswith("greedy_clusters"):
            ways.append("float64 pairs")
        ratios = {name for name in row if name.startswith("ratio to ")}
        assert ratios == {f"ratio to {way}" for way in ways}
        assert all(row[name] > 0 for name in ratios)
        assert row["share"] == row["ms"] / row["attention ms"]
        assert (row["wanted ratio"], row["wanted share"]) == (">= 50", "<= 0.03")
    assert all(0.1 < row["kept"] < 0.9 for row in rows[:2])


@pytest.mark.parametrize("name", ["greedy_clusters", "adaptive_blocks"])
def test_a_wrong_result_has_no_figure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., torch.Tensor] = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: real(*args, **options).roll(1, -1))
    result = run()
    assert result.exit_code == 1
    assert f"{name}, " in result.output and "no figure is given" in result.output
    assert "ratio to" not in result.output


@given(st.integers(0, 2**32 - 1), st.integers(0, 60), st.integers(1, 9), st.floats(0, 1))
def test_all_ways_through_a_segment_agree(
    seed: int, budget: int, max_block: int, delta: float
) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 9, (2, 60)) / 8
    offsets = np.array([0, *np.unique(rng.integers(1, 60, 6)), 60])
    one, other, third = (
        way(rows, offsets, budget, max_block=max_block, delta=delta)
        for way, rows in (
            (sequential.blocks, scores),
            (sequential.blocks, torch.from_numpy(scores)),
            (sequential.blocks_by_segment, scores),
        )
    )
    assert one == other == third
    assert all(len(kept) == min(budget, 60) for kept in one)


@given(st.integers(0, 2**32 - 1), st.floats(-0.9, 0.95))
def test_all_ways_through_a_chunk_agree(seed: int, theta: float) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(2, 40, 3)).astype(np.float32)
    offsets = np.array([0, *np.unique(rng.integers(1, 40, 4)), 40])
    clear = module.clear_of_cosines(keys, offsets, theta)
    one = sequential.cluster(keys, offsets, clear)
    assert np.array_equal(one, sequential.cluster(torch.from_numpy(keys), offsets, clear))
    assert np.array_equal(one, sequential.cluster_by_pairs(keys, offsets, clear))
    assert np.array_equal(one, sequential.cluster_by_seed(keys, offsets, clear))
    for own in one:
        for start, end in itertools.pairwise(offsets.tolist()):
            assert own[start] == start and set(own[start:end]) <= set(range(start, end))


def test_theta_is_moved_off_every_cosine() -> None:
    rng = np.random.default_rng(0)
    offsets = np.array([0, 300])
    keys = rng.normal(size=(1, 300, 2)).astype(np.float32)
    theta = module.clear_of_cosines(keys, offsets, 0.7)
    units = keys[0].astype(np.float64)
    units /= np.linalg.norm(units, axis=-1, keepdims=True)
    near = np.abs(units @ units.T - theta)
    assert abs(theta - 0.7) <= 1e-3
    assert near.min() > 1e-5
