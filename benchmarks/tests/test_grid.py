from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bench.grid import Results, Row, Variant, read

ROWS = st.builds(
    Row,
    method=st.sampled_from(["full", "sablock", "sentencekv"]),
    context=st.integers(1, 10**6),
    depth=st.floats(0, 1),
    budget=st.one_of(st.integers(1, 10**6), st.floats(0, 1, exclude_min=True)),
    samples=st.integers(1, 500),
    accuracy=st.floats(0, 1),
)


@given(rows=st.lists(ROWS, max_size=6, unique_by=lambda row: row.key))
@settings(max_examples=50)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    folder = tmp_path_factory.mktemp("results")
    first = Results(folder, {"seed": 1}, Row)
    for row in rows:
        first.add([row])
    again = Results(folder, {"seed": 1}, Row)
    assert set(again.rows.values()) == set(rows)
    assert all(again.has(row.variant, row.context, row.depth) for row in rows)
    if rows:
        assert set(read(folder / "results.csv", Row)) == set(rows)
        records = json.loads((folder / "results.json").read_text())
        assert {Row(**record) for record in records} == set(rows)


def test_files_hold_the_columns_that_are_promised(tmp_path: Path) -> None:
    Results(tmp_path, {}, Row).add([Row("full", 512, 0.5, 1.0, 4, 0.75)])
    record = {
        "method": "full",
        "context": 512,
        "depth": 0.5,
        "budget": 1.0,
        "samples": 4,
        "accuracy": 0.75,
    }
    assert json.loads((tmp_path / "results.json").read_text()) == [record]
    with (tmp_path / "results.csv").open(newline="") as lines:
        assert list(csv.DictReader(lines)) == [{name: str(x) for name, x in record.items()}]


def test_one_entry_is_not_the_whole_prompt(tmp_path: Path) -> None:
    results = Results(tmp_path, {}, Row)
    results.add([Row("sablock", 512, 0.5, 1, 4, 0.0), Row("sablock", 512, 0.5, 1.0, 4, 1.0)])
    again = Results(tmp_path, {}, Row)
    assert [row.accuracy for row in again.of(Variant("sablock", 1))] == [0.0]
    assert [row.accuracy for row in again.of(Variant("sablock", 1.0))] == [1.0]


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, {"seed": 1, "model": "a"}, Row)
    with pytest.raises(ValueError, match="holds results with seed 1, now it is 2: name another"):
        Results(tmp_path, {"seed": 2, "model": "a"}, Row)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("settings.json", "{", "settings.json cannot be read"),
        ("results.csv", "method,context\nfull,512\n", "results, but not their settings.json"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        Results(tmp_path, {}, Row)


@pytest.mark.parametrize("text", ["method,context\nfull,512\n", "\x00\n1,2\n", "a\nb\n"])
def test_a_table_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    Results(tmp_path, {}, Row)
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(ValueError, match=r"results.csv is no table of results"):
        Results(tmp_path, {}, Row)
