"""`kv-bench run` on a small random model and tasks of the test's own."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from fake_tasks import Numbers
from small_model import make_model, make_tokenizer

from kv_bench import runner
from kv_bench.ask import replies
from kv_bench.cli import main
from kv_bench.journal import COLUMNS
from kv_bench.tasks import TASKS, encode
from kv_integration import (
    FullKV,
    InfiniGen,
    SABlock,
    SemantiCache,
    SentenceKV,
    ShadowKV,
    SnapKV,
    attach,
)
from kv_integration.answer import GREEDY

TIMES = ("prefill", "prefill_s", "ttft_s", "per_token_s")
MINE = """
from dataclasses import dataclass
from kv_integration import SnapKV

@dataclass(frozen=True)
class Mine(SnapKV):
    window: int = 8

wrong = 3
"""


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Numbers]:
    fake = {"numbers": Numbers(), "turns": Numbers("turns", questions=3)}
    for name, task in fake.items():
        monkeypatch.setitem(TASKS, name, task)
    return fake


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, ["run", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def small(folder: Path, out: Path) -> list[str | Path]:
    return [
        *("numbers,turns", "--model", folder, "--out", out, "--contexts", "60"),
        *("--methods", "full,snapkv,sentencekv", "--budgets", "0.5,24", "--samples", "2"),
    ]


def tiny(folder: Path, out: Path) -> list[str | Path]:
    return [
        *("turns", "--model", folder, "--out", out, "--contexts", "60"),
        *("--methods", "full,snapkv", "--budgets", "0.5,24", "--samples", "2"),
    ]


def lines(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


# a single method that a killed run left over has a prefill of its own
def timeless(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


def key(record: dict[str, object]) -> tuple[object, ...]:
    names = ("task", "mode", "context", "sample", "method", "budget")
    return tuple(str(record[name]) for name in names)


@pytest.mark.parametrize("mode", ["aware", "agnostic"])
def test_a_line_per_sample_and_variant(folder: Path, tmp_path: Path, mode: str) -> None:
    result = run(*small(folder, tmp_path), "--mode", mode, "--contexts", "60,90")
    assert result.exit_code == 0, result.stderr
    records = lines(tmp_path)
    assert {key(record) for record in records} == {
        (task, mode, str(context), f"{task}-{at}", method, budget)
        for task in ("numbers", "turns")
        for context in (60, 90)
        for at in range(2)
        for method, budget in [
            ("full", "1.0"),
            *((m, b) for m in ("snapkv", "sentencekv") for b in ("0.5", "24")),
        ]
    }
    assert len(records) == 2 * 2 * 2 * 5
    for record in records:
        assert list(record) == COLUMNS
        assert record["status"] == "ok" and record["prefill"] == "shared"
        assert len(record["predictions"]) == (3 if record["task"] == "turns" else 1)
        assert record["ttft_s"] is None and record["prefill_s"] > 0
        assert 0 < record["entries_attended"] <= record["prompt_tokens"]
        if record["method"] == "snapkv":
            assert record["entries_attended"] == record["budget_entries"]
            full = next(r for r in records if key(r)[:4] == key(record)[:4])
            assert full["method"] == "full" and record["device_bytes"] < full["device_bytes"]
        if record["budget"] == 24:
            assert record["budget_entries"] == 24
        assert record["depth"] in (0.0, 0.1)
    assert [r for r in records if r["method"] == "sentencekv" and r["host_bytes"] > 0]
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert {"date", "device", "torch", "transformers", "commit"} <= saved["environment"].keys()
    assert saved["settings"]["seed"] == 0 and saved["command"].startswith("kv-bench")
    with (tmp_path / "summary.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == len(saved["rows"]) == 2 * 2 * 5
    for row in saved["rows"]:
        own = [
            record
            for record in records
            if all(record[k] == row[k] for k in ("task", "context", "method"))
            and str(record["budget"]) == str(row["budget"])
        ]
        assert row["samples"] == len(own) == 2 and row["failed"] == 0
        assert row["score"] == pytest.approx(sum(r["score"] for r in own) / 2)
        assert row["mode"] == mode


def test_own_prefill_gives_the_same_answers_and_the_first_token(
    folder: Path, tmp_path: Path
) -> None:
    for mode in ("aware", "agnostic"):
        run(*tiny(folder, tmp_path / "shared"), "--mode", mode)
        run(*tiny(folder, tmp_path / "own"), "--mode", mode, "--prefill", "own")
    shared, own = lines(tmp_path / "shared"), lines(tmp_path / "own")
    assert all(r["prefill"] == "own" and r["ttft_s"] >= r["prefill_s"] for r in own)
    assert timeless(own) == timeless(shared)


def conversation(model, tokenizer, encoded, method, *, aware: bool, count: int) -> list[str]:
    """Stock generate, turn by turn, with nothing of the benchmark around it."""
    questions = list(encoded.questions)
    ids = encoded.context + (questions.pop(0) if aware else [])
    texts = []

    def answer(cache) -> None:
        nonlocal ids
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=count,
            eos_token_id=0,
            pad_token_id=0,
            **GREEDY,
        )[0].tolist()
        new = out[len(ids) :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True).strip())
        ids = out[:-1] if new[-1] == 0 else out

    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method)
        if aware:
            answer(cache)
        else:
            model(torch.tensor([ids]), past_key_values=cache)
        for question in questions:
            ids = ids + question
            answer(cache)
    return texts


@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize("template", [True, False])
def test_turns_equal_each_method_alone(aware: bool, template: bool) -> None:
    tokenizer = make_tokenizer(template=template)
    model = make_model(len(tokenizer))
    for name, weight in model.named_parameters():
        if "q_proj" in name or "v_proj" in name:
            weight.data *= 8  # or attention is nearly uniform, and methods hardly differ
    methods = [FullKV(), SnapKV(budget=20, window=8), SentenceKV(budget=24, window=8)]
    methods += [SABlock(budget=24, window=8), SemantiCache(budget=60)]
    methods += [ShadowKV(budget=24, window=8, chunk=2, outliers=1, rank=12), InfiniGen(budget=24)]
    sample = Numbers(questions=3).samples(tokenizer, length=120)[1]
    encoded = encode(tokenizer, sample)
    found = replies(model, tokenizer, encoded, methods, aware=aware, max_new_tokens=6)
    wanted = [
        conversation(model, tokenizer, encoded, method, aware=aware, count=6) for method in methods
    ]
    assert [list(reply.predictions) for reply in found] == wanted
    assert len({tuple(texts) for texts in wanted}) > 1
    assert all(reply.shared == len(methods) and reply.ttft_s is None for reply in found)
    # what a method holds is its own, not that of the others behind the same prefill
    for method, reply in zip(methods, found, strict=True):
        alone = replies(model, tokenizer, encoded, [method], aware=aware, max_new_tokens=6)[0]
        assert alone.report.as_dict() == reply.report.as_dict()
        assert alone.ttft_s is not None


def test_an_answer_ends_at_a_stop_text() -> None:
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    encoded = encode(tokenizer, Numbers().samples(tokenizer, length=50)[0])
    free = replies(model, tokenizer, encoded, [FullKV()], aware=True, max_new_tokens=12)
    text = free[0].predictions[0]
    mark = text[len(text) // 2 : len(text) // 2 + 2]
    cut = replies(model, tokenizer, encoded, [FullKV()], aware=True, max_new_tokens=12, stop=[mark])
    assert cut[0].predictions[0] == text[: text.index(mark)]


def test_a_second_call_runs_only_what_is_missing(
    folder: Path, tmp_path: Path, tasks: dict[str, Numbers]
) -> None:
    base = tiny(folder, tmp_path)
    run(*base)
    before = lines(tmp_path)
    for task in tasks.values():
        task.made.clear()
    run(*base)
    assert lines(tmp_path) == before and not tasks["turns"].made
    run(*base, "--methods", "h2o", "--mode", "agnostic")
    after = lines(tmp_path)
    assert after[: len(before)] == before
    new = after[len(before) :]
    assert {record["mode"] for record in new} == {"agnostic"}
    assert {record["method"] for record in new} == {"full", "h2o", "snapkv"}


def test_a_line_that_was_cut_short_runs_again(folder: Path, tmp_path: Path) -> None:
    base = ["numbers", "--model", folder, "--out", tmp_path, "--methods", "full,snapkv"]
    run(*base)
    whole = (tmp_path / "samples.jsonl").read_bytes()
    wanted = timeless(lines(tmp_path))
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 1, ends[0], ends[0] + 1, ends[1] + 40, ends[3] - 1, len(whole) - 1):
        (tmp_path / "samples.jsonl").write_bytes(whole[:cut])
        assert run(*base).exit_code == 0
        assert timeless(lines(tmp_path)) == wanted


def work(arguments: list[str]) -> None:
    os.setsid()
    main(args=["run", *arguments])


def test_a_kill_at_any_moment_neither_repeats_nor_loses_a_sample(
    folder: Path, tmp_path: Path
) -> None:
    more = ["--contexts", "60,90"]
    arguments = [str(x) for x in (*small(folder, tmp_path / "killed"), *more)]
    run(*small(folder, tmp_path / "whole"), *more)
    wanted = timeless(lines(tmp_path / "whole"))
    journal = tmp_path / "killed" / "samples.jsonl"
    fork = multiprocessing.get_context("fork")  # torch is imported already
    before: list[dict[str, object]] = []
    moments = random.Random(0)
    for _ in range(60):
        process = fork.Process(target=work, args=(arguments,))
        process.start()
        size = journal.stat().st_size if journal.exists() else 0
        while process.is_alive() and not (journal.exists() and journal.stat().st_size > size):
            time.sleep(0.0005)
        time.sleep(moments.uniform(0, 0.2))
        if not process.is_alive():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        whole = journal.read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in whole if line.endswith("\n")]
        assert records[: len(before)] == before
        before = records
    else:
        pytest.fail("60 kills, and the run is not over")
    assert len(before) > 4, "the run was over before it was killed"
    assert process.exitcode == 0
    found = timeless(lines(tmp_path / "killed"))
    assert sorted(found, key=key) == sorted(wanted, key=key)
    assert (tmp_path / "killed" / "summary.csv").exists()


def test_out_of_memory_is_noted_and_the_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def scarce(model, tokenizer, encoded, methods, **options):
        calls.append(len(methods))
        if len(methods) > 1 or methods[0].name == "snapkv":
            return model(torch.zeros(2**40, 2**20))  # the allocator's own error
        return replies(model, tokenizer, encoded, methods, **options)

    monkeypatch.setattr(runner, "replies", scarce)
    base = ["numbers", "--model", folder, "--out", tmp_path, "--methods", "full,snapkv"]
    result = run(*base, "--samples", "2")
    assert result.exit_code == 0 and "2 out of memory" in result.stdout
    assert calls == [2, 1, 1] * 2
    records = lines(tmp_path)
    assert [r["status"] for r in records] == ["ok", "out of memory"] * 2
    assert records[1]["score"] is None and records[1]["device_bytes"] is None
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert [(row["method"], row["samples"], row["failed"]) for row in rows] == [
        ("full", 2, 0),
        ("snapkv", 0, 2),
    ]
    calls.clear()
    run(*base, "--samples", "2")
    assert calls == []


def test_other_errors_are_not_taken_for_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments, **options):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(runner, "replies", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run("numbers", "--model", folder, "--out", tmp_path, "--methods", "full")
    assert lines(tmp_path) == []


def test_perplexity_is_that_of_all_tokens_together(folder: Path, tmp_path: Path) -> None:
    base = ["perplexity", "--setting", "continuation=12", "--contexts", "120", "--samples", "3"]
    base += ["--model", folder, "--out", tmp_path, "--methods", "full,snapkv", "--budgets", "24"]
    assert run(*base).exit_code == 0
    records = lines(tmp_path)
    assert {(r["mode"], r["prefill"], r["scored_tokens"]) for r in records} == {
        ("agnostic", "own", 12)
    }
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    for row in rows:
        losses = [r["score"] for r in records if r["method"] == row["method"]]
        assert row["score"] == pytest.approx(math.exp(sum(losses) / 3))
        assert row["ttft_s"] > 0 and row["per_token_s"] > 0
    assert not (tmp_path / "kvpress").exists()  # has no answers
    changed = run(*base, "--setting", "continuation=10")
    assert "holds results with settings of perplexity" in changed.stderr


def test_a_setting_reaches_the_task(folder: Path, tmp_path: Path) -> None:
    base = ["numbers", "--model", folder, "--out", tmp_path, "--methods", "full"]
    assert run(*base, "--setting", "questions=2", "--samples", "1").exit_code == 0
    assert [len(record["predictions"]) for record in lines(tmp_path)] == [2]


def test_kvpress_folders(folder: Path, tmp_path: Path) -> None:
    run(*tiny(folder, tmp_path))
    run(*tiny(folder, tmp_path), "--mode", "agnostic")
    places = sorted(path.name for path in (tmp_path / "kvpress").iterdir())
    name = folder.name
    assert f"turns__{name}__snapkv__0.50__max_context60__query_aware" in places
    assert f"turns__{name}__no_press__0.00__max_context60" in places
    assert len(places) == 2 * 3
    place = tmp_path / "kvpress" / f"turns__{name}__snapkv__0.50__max_context60__query_aware"
    config = yaml.safe_load((place / "config.yaml").read_text())
    assert config["press_name"] == "snapkv" and config["compression_ratio"] == 0.5
    assert config["query_aware"] is True and config["max_context_length"] == 60
    records = [
        record
        for record in lines(tmp_path)
        if (record["task"], record["mode"], record["context"]) == ("turns", "aware", 60)
        and (record["method"], record["budget"]) == ("snapkv", 0.5)
    ]
    with (place / "predictions.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["predicted_answer"] for row in rows] == [
        p for r in records for p in r["predictions"]
    ]
    assert rows[0]["answer"] == "['1', 'one']"
    score = json.loads((place / "metrics.json").read_text())["turns"]["accuracy"]
    assert score == pytest.approx(50 * sum(r["score"] for r in records), abs=0.01)


def test_a_method_of_the_users_own(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    base = ["numbers", "--model", folder, "--out", tmp_path / "out", "--methods", "snapkv"]
    own = ["--method-module", f"{file}:Mine", "--budgets", "20"]
    assert run(*base, *own).exit_code == 0
    assert {record["method"] for record in lines(tmp_path / "out")} == {"snapkv", "mine"}
    assert {r["entries_attended"] for r in lines(tmp_path / "out")} == {20}
    assert run(*base, "--budgets", "20").exit_code == 0
    file.write_text(MINE.replace("window: int = 8", "window: int = 4"))
    assert "holds results with method mine" in run(*base, *own).stderr


def test_two_methods_of_the_users_own_have_two_names(folder: Path, tmp_path: Path) -> None:
    places = [tmp_path / "one.py", tmp_path / "two.py"]
    for place in places:
        place.write_text(MINE)
    own = [text for place in places for text in ("--method-module", f"{place}:Mine")]
    result = run("numbers", "--model", folder, "--out", tmp_path / "out", *own)
    assert result.exit_code == 2 and "is the second method named mine" in result.stderr


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nothing.py:Mine", "must be FILE.py:NAME of a file that exists"),
        ("mine.py", "must be FILE.py:NAME of a file that exists"),
        ("mine.py:Other", "has no method class Other"),
        ("mine.py:wrong", "has no method class wrong"),
        ("mine.py:SnapKV", "is called as a method that exists, snapkv"),
        ("broken.py:Mine", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_wrong_methods_of_the_users_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    result = run("numbers", "--model", folder, "--out", "out", "--method-module", place)
    assert result.exit_code == 2 and message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["numbers", "--setting", "colour=red"], "has no setting 'colour'; it has"),
        (["numbers", "--setting", "questions"], "--setting must be NAME=VALUE, got 'questions'"),
        (["numbers", "--setting", "questions=x"], "must be of type int, got 'x'"),
        (["nothing"], "there is no task 'nothing'; there are"),
        (["nothing"], "; groups: niah, ruler, longbench, infinitebench"),
        ([","], "no task is given, got ','; there are"),
        (["numbers", "--methods", "magic"], "unknown method 'magic'; wanted one of full,"),
        (["numbers", "--budgets", "1.5"], "in (0, 1], got 1.5"),
        (["numbers", "--budgets", "few"], "budget must be a number of entries"),
        (["numbers", "--budgets", ","], "--budgets must name at least one budget"),
        (["numbers", "--contexts", "x"], "--contexts must be positive integers"),
        (["numbers", "--samples", "0"], "--samples must be at least 1, got 0"),
        (["numbers", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["numbers", "--mode", "both"], "Invalid value for '--mode'"),
        (["numbers", "--data", "turns=x"], "is for 'turns', which does not run"),
        (["numbers", "--data", "a", "--data", "b"], "must say which task each place is for"),
        (["numbers", "--contexts", "3000", "--max-new-tokens", "4000"], "the model's 4096"),
    ],
)
def test_wrong_input(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments, "--model", folder, "--out", tmp_path / "out")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and message in result.stderr
    assert not (tmp_path / "out" / "summary.csv").exists()


def test_results_of_other_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    base = tiny(folder, tmp_path)
    run(*base)
    before = (tmp_path / "samples.jsonl").read_bytes()
    for other in (["--seed", "1"], ["--samples", "3"], ["--max-new-tokens", "2"]):
        assert "name another --out" in run(*base, *other).stderr
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_a_foreign_journal_is_refused(folder: Path, tmp_path: Path) -> None:
    base = tiny(folder, tmp_path)
    run(*base)
    with (tmp_path / "samples.jsonl").open("a") as journal:
        journal.write('{"task": "numbers", "colour": "red"}\n')
    assert "line 7 is no record of a sample" in run(*base).stderr


def test_two_runs_do_not_write_to_one_folder(folder: Path, tmp_path: Path) -> None:
    from kv_bench.journal import Journal

    run(*tiny(folder, tmp_path))
    with Journal(tmp_path), pytest.raises(ValueError, match="another run is writing"):
        Journal(tmp_path)
