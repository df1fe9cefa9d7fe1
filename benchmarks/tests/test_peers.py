"""`kv-bench peers`: the worker that both sides run, and the turns that they take."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from fake_tasks import Numbers
from small_model import make_tokenizer

from kv_bench import peer_worker
from kv_bench.cli import main
from kv_bench.peers import Pair, Side, figures, process
from kv_bench.tasks import encode

CONTEXT, QUESTION = [5 + n % 300 for n in range(120)], [7, 8, 9]


@pytest.fixture(scope="module")
def worker(folder: Path) -> peer_worker.Worker:
    found = peer_worker.Worker()
    versions = found.load(model=str(folder), dtype="float32", threads=1)
    assert {"torch", "transformers"} <= versions.keys()
    return found


def reply(worker: peer_worker.Worker, side: str, kept: int = 40, *, aware: bool = False) -> dict:
    return worker.run(
        side=side, kept=kept, context=CONTEXT, question=QUESTION, tokens=4, aware=aware
    )


def test_full_kv_and_dynamic_cache_agree(worker: peer_worker.Worker) -> None:
    ours, theirs = reply(worker, "ours:full"), reply(worker, "transformers:dynamic")
    assert ours["tokens"] == theirs["tokens"] and len(ours["tokens"]) == 4
    assert ours["kept"] == theirs["kept"] == [120, 120]
    assert len(ours["steps_s"]) == 3 and ours["ttft_s"] > 0
    # two layers, two KV heads of 8, float32; the last token is not fed back
    assert theirs["live_bytes"] == 2 * 2 * 2 * 8 * 4 * (120 + 3 + 3)
    assert ours["live_bytes"] >= theirs["live_bytes"]


def test_the_question_may_be_compressed_with_the_context(worker: peer_worker.Worker) -> None:
    for side in ("ours:full", "transformers:dynamic"):
        apart, together = reply(worker, side), reply(worker, side, aware=True)
        assert together["tokens"] == apart["tokens"]
        assert together["kept"] == [123, 123] and len(together["steps_s"]) == 3
    assert reply(worker, "ours:snapkv", aware=True)["kept"] == [40, 40]


@pytest.mark.parametrize("name", ["snapkv", "chunkkv", "streamingllm", "tova"])
def test_ours_keeps_what_it_is_told(worker: peer_worker.Worker, name: str) -> None:
    found = reply(worker, f"ours:{name}", kept=33)
    assert found["kept"] == [33, 33]
    assert found["live_bytes"] < reply(worker, "ours:full")["live_bytes"]


def test_what_is_not_there_says_so(worker: peer_worker.Worker) -> None:
    assert reply(worker, "ours:nothing") == {"unavailable": "there is no nothing here"}
    assert "there is no GPU" in reply(worker, "transformers:offloaded")["unavailable"]
    if peer_worker.installed("kvpress") is None:
        assert "kvpress" in reply(worker, "kvpress:snapkv")["unavailable"]


@pytest.mark.parametrize("rotates", [True, False])
def test_a_press_is_told_where_there_is_no_rope(rotates: bool) -> None:
    class Press:
        def score(self, module, hidden, keys, values, attentions, kwargs):  # type: ignore[no-untyped-def]
            return kwargs["position_embeddings"]

    class Module:
        use_rope = rotates

    press = Press()
    peer_worker.leave_unrotated(press)
    tables = torch.tensor([0.5, 0.6]), torch.tensor([0.8, 0.7])
    given = {"position_embeddings": tables}
    cos, sin = press.score(Module(), None, None, None, None, given)
    expected = tables if rotates else (torch.ones(2), torch.zeros(2))
    assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])


class Fake:
    """A worker whose replies follow from what it is asked."""

    def __init__(self, name: str, log: list[tuple[str, int]], kept: int | None) -> None:
        self.name, self.log, self.kept = name, log, kept

    def ask(self, request: dict) -> dict:
        self.log.append((self.name, request["kept"]))
        if self.kept is None:
            return {"unavailable": "it is not here"}
        time = 1.0 if self.name == "ours" else 2.0
        held = {"live_bytes": 2048 if self.name == "ours" else 8192, "kept": [self.kept] * 2}
        return {"tokens": [5, 6], "ttft_s": time, "steps_s": [time, time], **held}


def turns(kept: int | None) -> tuple[Pair, list[tuple[str, int]]]:
    tokenizer = make_tokenizer()
    log: list[tuple[str, int]] = []
    sides = [Side(f"{name}:x", Fake(name, log, n)) for name, n in (("ours", 21), ("theirs", kept))]
    pair = Pair(*sides, aware=False)
    for number, sample in enumerate(Numbers().samples(tokenizer, length=40, count=4)):
        pair.run(number, sample, encode(tokenizer, sample), kept=20, tokens=2)
    return pair, log


def test_they_take_turns_and_ours_keeps_what_theirs_kept() -> None:
    pair, log = turns(kept=21)
    assert log[:2] == [("theirs", 20), ("ours", 21)]
    assert log[2:] == [
        *(("theirs", 20), ("ours", 21)),
        *(("ours", 21), ("theirs", 20)),
        *(("theirs", 20), ("ours", 21)),
    ]
    row = pair.row(None)
    assert (row["kept"], row["their_kept"]) == (21, 21)
    assert (row["ttft_ratio"], row["token_ratio"], row["live_ratio"]) == (0.5, 0.5, 0.25)
    assert row["accuracy"] is None and pair.missing == {}


def test_a_side_that_is_missing_leaves_its_columns_empty() -> None:
    pair, log = turns(kept=None)
    assert [name for name, _ in log].count("theirs") == 1
    row = pair.row(None)
    assert row["their_ttft_ms"] is None and row["ttft_ratio"] is None and row["ttft_ms"] == 1000.0
    assert pair.missing == {"theirs:x": "it is not here"}


def test_accuracy_is_over_all_prompts() -> None:
    pair, _ = turns(kept=21)
    tokenizer = make_tokenizer()
    score = Numbers().score([tokenizer.decode([5, 6])], pair.samples[0])

    class Loaded:
        pass

    Loaded.tokenizer = tokenizer
    found = figures(pair.ours, pair.samples, {"task": Numbers(), "loaded": Loaded})
    assert found["accuracy"] == pytest.approx(score)


def test_a_process_that_ends_is_reported() -> None:
    ending = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(7)"]
    with (
        process(ending) as worker,
        pytest.raises(click.ClickException, match="ended with 7 at load"),
    ):
        worker.ask({"op": "load"})


@pytest.mark.parametrize(
    ("python", "message"),
    [("missing/python", "there is no missing/python"), (None, "Missing option '--python'")],
)
def test_wrong_input(python: str | None, message: str) -> None:
    result = CliRunner().invoke(main, ["peers", *(["--python", python] if python else [])])
    assert result.exit_code == 2 and message in result.output
