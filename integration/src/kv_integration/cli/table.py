"""Results of several methods as one table, for a terminal and for a Markdown file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kv_integration.cli.result import Result
from kv_integration.report import format_bytes

HEADERS = (
    "method",
    "answer",
    "right?",
    "entries per step",
    "on the device",
    "on the host",
    "first token",
    "per token",
)
LEFT = 3  # columns that hold words
PLAIN_WIDTH = 160
NOTE = (
    "Shares are of the prompt (entries) and of full KV (bytes); factors are times full KV's time."
)


def with_share(text: str, part: float, whole: float) -> str:
    """`text` and what share of `whole` it is."""
    return f"{text} ({part / whole:.1%})" if whole else text


def rows(results: Sequence[Result]) -> list[list[str]]:
    """One row of text per result, under HEADERS."""
    full = next((r.answer for r in results if r.name == "full"), None)

    def timed(seconds: float | None, reference: float | None) -> str:
        if seconds is None:
            return "-"
        text = f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
        return f"{text} ({seconds / reference:.2f}x)" if reference else text

    table = []
    for result in results:
        answer = result.answer
        table.append(
            [
                result.label,
                textwrap.shorten(answer.answer, 40, placeholder="…"),
                result.verdict,
                with_share(
                    f"{answer.entries_attended}", answer.entries_attended, answer.prompt_tokens
                ),
                *(
                    with_share(format_bytes(size), size, answer.full_kv_bytes)
                    for size in (answer.device_bytes, answer.host_bytes)
                ),
                timed(answer.ttft_s, full.ttft_s if full else None),
                timed(answer.per_token_s, full.per_token_s if full else None),
            ]
        )
    return table


def print_table(results: Sequence[Result], caption: str) -> None:
    """Print the table to stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, caption=Text(f"{caption}\n{NOTE}"), caption_justify="left")
    for at, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if at < LEFT else "right", overflow="fold")
    styles = {"right": "green", "wrong": "red", "-": ""}
    for row in rows(results):
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    console.print(table)


def markdown(results: Sequence[Result], caption: str) -> str:
    """The table as Markdown."""
    rule = ["---"] * LEFT + ["---:"] * (len(HEADERS) - LEFT)
    lines = [HEADERS, rule, *rows(results)]
    escaped = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in line] for line in lines]
    body = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
    return f"{body}\n\nPrompt: {caption}\n\n{NOTE}\n"
