"""`kv-bench report`: tables and pictures of records made by hand."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kv_bench.cli import main
from kv_bench.figures import Styles, pareto_front
from kv_bench.journal import OUT_OF_MEMORY, Record
from kv_bench.report import with_a_grid
from kv_bench.summary import summarise

POINT = st.tuples(st.integers(0, 6).map(float), st.integers(0, 6).map(float))


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def records() -> list[Record]:
    made = []
    variants = [("full", 1.0), ("snapkv", 0.1), ("snapkv", 64), ("h2o", 0.1), ("h2o", 64)]
    for context in (512, 1024):
        for sample in range(2):
            for method, budget in variants:
                made.append(
                    Record(
                        task="needle & <thread>",
                        metric="accuracy",
                        mode="aware",
                        context=context,
                        sample=str(sample),
                        method=method,
                        budget=budget,
                        score=sample / 2 + 0.25,
                        depth=float(sample),
                        prompt_tokens=context,
                        budget_entries=context if method == "full" else 64,
                        entries_attended=context if method == "full" else 64,
                        entries_mean=context if method == "full" else 64,
                        device_bytes=2**20 if method == "full" else 2**17,
                        host_bytes=0,
                        full_kv_bytes=2**20,
                        ttft_s=0.5,
                        per_token_s=0.01,
                    )
                )
    made.append(Record("needle & <thread>", "accuracy", "aware", 2048, "0", status=OUT_OF_MEMORY))
    made += [
        Record(
            task="perplexity",
            metric="perplexity",
            mode="agnostic",
            context=512,
            sample=str(n),
            score=float(n),
            scored_tokens=9,
            bytes_moved=9 * n * 2**10,
            hit_rate=n / 4,
        )
        for n in (1, 2)
    ]
    return made


def write(folder: Path, found: list[Record]) -> Path:
    folder.mkdir()
    lines = [json.dumps(asdict(record)) + "\n" for record in found]
    (folder / "samples.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.filterwarnings("error")
def test_one_page_with_all_rows_and_pictures(tmp_path: Path) -> None:
    folder = write(tmp_path / "results", records())
    result = run(folder)
    assert result.exit_code == 0, result.output
    out = folder / "report"
    pictures = sorted(path.name for path in out.glob("*.png"))
    assert {name.split("-")[0] for name in pictures} == {
        *("budget", "context", "heat", "pareto", "tasks")
    }
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    page = (out / "report.html").read_text()
    assert page.count("<img") == page.count('src="data:image/png;base64,') == len(pictures)
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "needle &amp; &lt;thread&gt;" in page and "<thread>" not in page
    rows = summarise(records())
    assert page.count("<tr>") == len(rows) + 1
    with (out / "report.csv").open(newline="") as table:
        saved = list(csv.DictReader(table))
    assert [row["method"] for row in saved] == [row.method for row in rows]
    first = saved[1]
    assert (first["method"], first["budget"], first["score"]) == ("snapkv", "0.1", "0.5")
    assert (first["device_mib"], first["token_ms"]) == ("0.125", "10.0")
    assert saved[5 * 2]["failed"] == "1" and saved[5 * 2]["score"] == ""
    assert (saved[-1]["hit_rate"], saved[-1]["moved_kib"]) == ("0.375", "1.5")
    assert len((out / "report.md").read_text().split("\n\n")[0].splitlines()) == len(rows) + 2


def test_without_heat_maps(tmp_path: Path) -> None:
    folder = write(tmp_path / "results", records())
    assert run(folder, "--no-heat-maps").exit_code == 0
    names = {path.name.split("-")[0] for path in (folder / "report").glob("*.png")}
    assert names == {"budget", "context", "pareto", "tasks"}


def test_several_folders_make_one_report(tmp_path: Path) -> None:
    found = records()[-3:]
    folders = [write(tmp_path / str(n), found[n::2]) for n in range(2)]
    assert run(*folders, "--out", tmp_path / "both").exit_code == 0
    text = (tmp_path / "both" / "report.csv").read_text()
    assert len(text.splitlines()) == len(summarise(found)) + 1


def test_wrong_folders(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty", [])
    for folder, message in ((tmp_path, "is no folder of results"), (empty, "has no results yet")):
        result = run(folder)
        assert result.exit_code == 2 and message in result.stderr


@given(points=st.lists(POINT, min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    def beaten(point: tuple[float, float]) -> bool:
        return any(
            other != point and other[0] <= point[0] and other[1] >= point[1] for other in points
        )

    assert pareto_front(points) == sorted({point for point in points if not beaten(point)})


def test_no_two_methods_are_drawn_alike() -> None:
    names = ["full", *(f"method{n}" for n in range(24))]
    styles = Styles(names)
    drawn = {tuple(str(styles[n].get(k)) for k in ("color", "marker", "linestyle")) for n in names}
    assert len(drawn) == len(names)


@pytest.mark.parametrize(
    ("depths", "exact"),
    [([0.0, 0.25, 0.5, 0.75, 1.0], True), ([0.5], True), ([0.1, 0.15, 0.9], False)],
)
def test_depths_drawn_at_random_are_no_grid_at_a_single_length(
    depths: list[float], exact: bool
) -> None:
    found = [
        Record("needle", "accuracy", "aware", 512, str(n), depth=depth)
        for n, depth in enumerate(depths)
    ]
    assert with_a_grid(found) == ({"needle"} if exact else set())
