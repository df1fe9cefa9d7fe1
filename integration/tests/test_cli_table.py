"""The table of `compare`, with answers that could break it."""

from __future__ import annotations

import pytest

from kv_integration.answer import Answer
from kv_integration.cli.result import Result
from kv_integration.cli.table import HEADERS, markdown, print_table, rows


def result(name: str, text: str, *, seconds: float | None = 0.004) -> Result:
    figures = {"entries_attended": 25, "device_bytes": 512, "host_bytes": 1536, "disk_bytes": 0}
    answer = Answer(
        method=name,
        budget=25,
        answer=text,
        prompt_tokens=100,
        full_kv_bytes=2048,
        ttft_s=2.0,
        per_token_s=seconds,
        **figures,
    )
    return Result(name, answer, "123456")


def test_figures_and_ratios() -> None:
    full, other = rows([result("full", "123456"), result("sablock", "12", seconds=0.001)])
    assert full[2:] == [
        *("right", "25 (25.0%)", "512 B (25.0%)", "1.50 KiB (75.0%)"),
        *("2.00 s (1.00x)", "4.0 ms (1.00x)"),
    ]
    assert other[2] == "wrong" and other[-1] == "1.0 ms (0.25x)"
    alone = rows([result("sablock", "12", seconds=None)])[0]
    assert alone[-2:] == ["2.00 s", "-"]  # no full KV to compare with, one token only


@pytest.mark.parametrize("text", ["a | b", "one\ntwo", "[red]1[/red]", "\\|", "", "x" * 99])
def test_any_answer_keeps_the_table_whole(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = [result("full", text), result("sablock", text)]
    lines = markdown(results, "a caption").splitlines()
    assert [line.replace("\\\\", "").replace("\\|", "").count("|") for line in lines[:4]] == [
        len(HEADERS) + 1
    ] * 4
    assert "Prompt: a caption" in lines
    print_table(results, "a caption")
    printed = capsys.readouterr().out
    assert printed.count("wrong") == 2 and "a caption" in printed
    if text.startswith("["):
        assert printed.count(text) == 2
