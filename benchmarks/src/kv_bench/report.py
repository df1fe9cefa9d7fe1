"""`kv-bench report`: tables, figures and one page from what `kv-bench run` left."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
from jinja2 import Environment

from kv_bench.grid import Row
from kv_bench.journal import JOURNAL, OK, Record, read
from kv_bench.summary import Summary, summarise
from kv_integration.cli.files import whole_file, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIB, MIB = 2**10, 2**20
SAME_STEP = 1e-3  # depths are rounded
COLUMNS = {
    "task": "task",
    "metric": "metric",
    "mode": "mode",
    "context": "context",
    "method": "method",
    "budget": "budget",
    "score": "score",
    "score_se": "± SE",
    "entries_mean": "entries attended",
    "entries_asked": "entries asked",
    "device_mib": "device MiB",
    "host_mib": "host MiB",
    "full_kv_mib": "full KV MiB",
    "hit_rate": "hit rate",
    "moved_kib": "KiB moved per token",
    "ttft_ms": "TTFT ms",
    "token_ms": "ms per token",
    "samples": "samples",
    "failed": "out of memory",
}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
        color: #222; }
 table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
 th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
 th { border-bottom: 2px solid #888; }
 td.text, th.text { text-align: left; }
 .wide { overflow-x: auto; }
 figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; }
 figcaption { color: #555; font-size: 13px; max-width: 60rem; }
 @media print { body { margin: 0; max-width: none; } figure, tr { break-inside: avoid; } }
</style>
<h1>{{ title }}</h1>
{% for about in abouts %}
<p>{% for name, value in about.items() %}{{ name }} {{ value }}{{ "; " if not loop.last }}
{%- endfor %}</p>
{% endfor %}
<p>Aware: context and question are compressed together. Agnostic: the context alone, and the
question comes as a later turn. Bytes are those of the tensors that existed after the last answer;
entries are those of the prompt that one decoding step attends per KV head, mean over layers.</p>
{% for picture in pictures %}
<figure>
 <img alt="{{ picture.caption }}" src="data:image/png;base64,{{ picture.data }}">
 <figcaption>{{ picture.caption }}</figcaption>
</figure>
{% endfor %}
<h2>All figures</h2>
<div class="wide"><table>
<tr>{% for name in header %}<th{{ ' class="text"' | safe if loop.index <= 6 }}>{{ name }}</th>
{%- endfor %}</tr>
{% for line in lines %}
<tr>{% for cell in line %}<td{{ ' class="text"' | safe if loop.index <= 6 }}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}
</table></div>
</html>
"""


@dataclass(frozen=True)
class Picture:
    """A figure that was written, and what it shows."""

    name: str
    caption: str
    png: bytes

    @property
    def data(self) -> str:
        return base64.b64encode(self.png).decode()


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The report goes here.  [default: `report` in the first of RESULTS]",
)
@click.option(
    "--heat-maps/--no-heat-maps",
    default=True,
    show_default=True,
    help="One for each method, budget and task whose needles have a depth.",
)
def report(results: tuple[Path, ...], out: Path | None, heat_maps: bool) -> None:
    """Tables and figures of RESULTS, folders that `kv-bench run` has left.

    Leaves report.html (one page, pictures included), report.md, report.csv and the pictures in DIR.
    """
    records = [record for folder in results for record in read_records(folder)]
    rows = summarise(records)
    out = results[0] / "report" if out is None else out
    pictures = [render(name, caption, figure) for name, caption, figure in draw(rows)]
    if heat_maps:
        pictures += depth_maps(records)
    for picture in pictures:
        with whole_file(out / f"{picture.name}.png") as file:
            file.write_bytes(picture.png)
    lines = [cells(row) for row in rows]
    write_text(out / "report.csv", as_csv(rows))
    write_text(out / "report.md", as_markdown(lines, pictures))
    title = ", ".join(dict.fromkeys(row.task for row in rows))
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    write_text(
        out / "report.html",
        page.render(
            title=f"KV-cache methods: {title}",
            abouts=[about(folder) for folder in results],
            pictures=pictures,
            header=list(COLUMNS.values()),
            lines=lines,
        ),
    )
    click.echo(f"{len(rows)} rows and {len(pictures)} pictures in {out}")


def read_records(folder: Path) -> list[Record]:
    """The samples of a result folder.

    Raises:
        ValueError: it is none, or has no sample yet.
    """
    if not (folder / JOURNAL).is_file():
        raise ValueError(f"{folder} is no folder of results: `kv-bench run --out` makes one")
    records = read(folder / JOURNAL)
    if not records:
        raise ValueError(f"{folder} has no results yet")
    return records


def about(folder: Path) -> dict[str, object]:
    """What the results of a folder were made with and on; little before the run's end."""
    file = folder / "summary.json"
    if not file.is_file():
        return {"results": folder.name, "state": "the run is not over"}
    content = json.loads(file.read_text(encoding="utf-8"))
    return {"command": content["command"], **content["environment"]}


def draw(rows: Sequence[Summary]) -> Iterator[tuple[str, str, Figure]]:
    """Name, caption and figure of all that the rows can show."""
    from kv_bench import figures  # matplotlib takes a second to import

    styles = figures.Styles(row.method for row in rows)
    for task, mode in dict.fromkeys((row.task, row.mode) for row in rows):
        here = [row for row in rows if (row.task, row.mode) == (task, mode)]
        scored = [row for row in here if row.score is not None]
        if len({row.variant.label for row in scored if row.method != "full"}) > 1:
            yield (
                f"budget-{task}-{mode}",
                f"{task}, {mode}: {here[0].metric} against the share of the prompt that a step "
                "attends; bars are standard errors over samples",
                figures.score_against_budget(scored, styles),
            )
    if len({row.context for row in rows}) > 1:
        for name, text, label, value in (
            ("device", "bytes on the device", "MiB on the device", partial(scaled, "device_bytes")),
            ("host", "bytes on the host", "MiB on the host", partial(scaled, "host_bytes")),
            (
                "ttft",
                "time to the first token (own prefill)",
                "ms to the first token",
                partial(ms, "ttft_s"),
            ),
            ("token", "time per token", "ms per token", partial(ms, "per_token_s")),
        ):
            if any(value(row) for row in rows):
                yield (
                    f"context-{name}",
                    f"{text} against the context, mean over tasks",
                    figures.over_context(rows, styles, value=value, label=label),
                )
    rated = [row for row in rows if row.score is not None and not row.lower_is_better]
    for mode in dict.fromkeys(row.mode for row in rated):
        own = [row for row in rated if row.mode == mode]
        for budget in dict.fromkeys(row.budget for row in own if row.method != "full"):
            text = figures.budget_text(budget)
            yield (
                f"tasks-{mode}-{budget}",
                f"score per task, {mode}, budget {text}, mean over contexts",
                figures.task_bars([row for row in own if figures.is_at(row, budget)], styles),
            )
        yield (
            f"pareto-{mode}",
            f"quality against bytes on the device, {mode}, means over tasks and contexts; larger "
            "markers are larger budgets, the line joins what nothing else beats in both",
            figures.pareto(own, styles),
        )


def depth_maps(records: Sequence[Record]) -> list[Picture]:
    """Score over context and depth, for tasks whose samples have a depth."""
    from kv_bench.heatmap import draw as draw_map

    groups: dict[tuple[str, str, str], dict[tuple[int, float], list[float]]] = {}
    exact = with_a_grid(records)
    for record in records:
        if record.status == OK and record.depth is not None and record.score is not None:
            group = groups.setdefault((record.task, record.mode, record.variant.label), {})
            depth = record.depth if record.task in exact else round(record.depth, 1)
            place = (record.context or record.prompt_tokens or 0, depth)
            group.setdefault(place, []).append(record.score)
    found = []
    for (task, mode, label), scores in groups.items():
        variant = next(record.variant for record in records if record.variant.label == label)
        rows = [
            Row(variant.method, context, depth, variant.budget, len(own), sum(own) / len(own))
            for (context, depth), own in scores.items()
        ]
        buffer = io.BytesIO()
        draw_map(rows, f"{task}, {mode}\n{label}", buffer)
        caption = f"{task}, {mode}, {label}: score over context and depth"
        found.append(Picture(f"heat-{task}-{mode}-{label}", caption, buffer.getvalue()))
    return found


def with_a_grid(records: Sequence[Record]) -> set[str]:
    """Tasks whose depths are evenly spaced; those of others are drawn at random."""
    depths: dict[str, set[float]] = {}
    for record in records:
        if record.depth is not None:
            depths.setdefault(record.task, set()).add(record.depth)
    return {task for task, found in depths.items() if evenly_spaced(sorted(found))}


def evenly_spaced(places: Sequence[float]) -> bool:
    """Whether ascending `places` are all equally far from the next."""
    steps = [after - before for before, after in pairwise(places)]
    return not steps or max(steps) - min(steps) < SAME_STEP


def render(name: str, caption: str, figure: Figure) -> Picture:
    """The figure at 200 dots per inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=200, format="png")
    return Picture(name, caption[:1].upper() + caption[1:], buffer.getvalue())


def scaled(name: str, row: Summary) -> float | None:
    """A number of bytes in MiB."""
    value = getattr(row, name)
    return None if value is None else value / MIB


def ms(name: str, row: Summary) -> float | None:
    """Seconds in ms."""
    value = getattr(row, name)
    return None if value is None else 1e3 * value


def figures_of(row: Summary) -> dict[str, object]:
    """The columns of the tables, unrounded."""
    derived = {
        "device_mib": scaled("device_bytes", row),
        "host_mib": scaled("host_bytes", row),
        "full_kv_mib": scaled("full_kv_bytes", row),
        "moved_kib": None if row.moved_per_token is None else row.moved_per_token / KIB,
        "ttft_ms": ms("ttft_s", row),
        "token_ms": ms("per_token_s", row),
    }
    return {name: derived[name] if name in derived else getattr(row, name) for name in COLUMNS}


def cells(row: Summary) -> list[str]:
    """The columns of the tables for people; "-" for what was not measured."""
    texts = []
    for name, value in figures_of(row).items():
        if value is None:
            texts.append("-")
        elif name == "budget":
            texts.append("" if row.method == "full" else str(value))
        elif name == "hit_rate" or (name in ("score", "score_se") and not row.lower_is_better):
            texts.append(f"{float(str(value)):.1%}")
        elif isinstance(value, float):
            texts.append(f"{value:,.0f}" if name.startswith("entries") else f"{value:,.2f}")
        else:
            texts.append(f"{value:,}" if isinstance(value, int) else str(value))
    return texts


def as_csv(rows: Sequence[Summary]) -> str:
    """The columns of the tables, unrounded."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(figures_of(row) for row in rows)
    return text.getvalue()


def as_markdown(lines: Sequence[Sequence[str]], pictures: Sequence[Picture]) -> str:
    """All rows in one table, and the pictures."""
    table = [list(COLUMNS.values()), [":--"] * 6 + ["--:"] * (len(COLUMNS) - 6), *map(list, lines)]
    text = [f"| {' | '.join(line)} |" for line in table]
    shown = [f"![{html.escape(p.caption)}]({p.name}.png)\n\n{p.caption}" for p in pictures]
    return "\n".join(text) + "\n\n" + "\n\n".join(shown) + "\n"
