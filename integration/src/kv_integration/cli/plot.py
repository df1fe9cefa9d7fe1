"""The figure of `compare`: what each method holds, reads and takes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kv_integration.cli.result import Result

DEVICE, HOST, OTHER = "#2b6cb0", "#a9c9e8", "#5b7083"
RIGHT, WRONG, UNKNOWN = "#23783c", "#b3261e", "#333333"
MARKS = {True: ("✓ ", RIGHT), False: ("✗ ", WRONG), None: ("", UNKNOWN)}


def draw(results: Sequence[Result], caption: str, path: Path) -> None:
    """Write the figure of `results` to `path`, in the format that its suffix names."""
    figure = Figure(figsize=(12, 1.9 + 0.52 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    held, read, taken = figure.subplots(1, 3, sharey=True, width_ratios=[1.3, 1, 1])
    draw_bytes(held, results)
    draw_bars(
        read,
        "Entries of the prompt per step",
        [r.answer.entries_attended for r in results],
        [f"{r.answer.entries_attended:,}" for r in results],
    )
    seconds = [r.answer.per_token_s for r in results]
    draw_bars(
        taken,
        "Time per token (ms)",
        [1000 * (s or 0.0) for s in seconds],
        ["-" if s is None else f"{1000 * s:.1f} ms" for s in seconds],
    )
    held.set_yticks(range(len(results)), [MARKS[r.correct][0] + r.label for r in results])
    held.invert_yaxis()
    for label, result in zip(held.get_yticklabels(), results, strict=True):
        label.set_color(MARKS[result.correct][1])
    marks = "✓ right answer, ✗ wrong answer.  " if results[0].correct is not None else ""
    note = textwrap.fill(marks + caption[:1].upper() + caption[1:], 170)
    handles, names = held.get_legend_handles_labels()
    figure.legend(handles, names, loc="upper right", ncols=2, fontsize=9, frameon=False)
    figure.suptitle("One prompt, one question, several caches", x=0.01, ha="left", weight="bold")
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="#555555")
    figure.savefig(path, dpi=150, format=path.suffix[1:].lower())


def draw_bytes(axes: Axes, results: Sequence[Result]) -> None:
    """Stacked bars: share of full KV on the device and on the host."""
    places = range(len(results))
    device = [r.answer.device_bytes / r.answer.full_kv_bytes for r in results]
    host = [r.answer.host_bytes / r.answer.full_kv_bytes for r in results]
    axes.barh(places, device, color=DEVICE, label="on the device")
    axes.barh(places, host, left=device, color=HOST, label="on the host")
    for place, (near, far) in enumerate(zip(device, host, strict=True)):
        text = f"{near:.1%}" + (f" + {far:.1%}" if far else "")
        axes.annotate(text, (near + far, place), (4, 0), textcoords="offset points", va="center")
    axes.set_title("Bytes held, as share of full KV", loc="left", fontsize=10)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.axvline(1.0, color="#888888", linewidth=0.8, linestyle="--")
    ends = [near + far for near, far in zip(device, host, strict=True)]
    widest = max(1.0, *ends)
    labels = [0.45 if far else 0.25 for far in host]  # room for the text behind each bar
    axes.set_xlim(0, max(end + widest * room for end, room in zip(ends, labels, strict=True)))
    tidy(axes)


def draw_bars(axes: Axes, title: str, values: Sequence[float], labels: Sequence[str]) -> None:
    """Plain bars with their values written beside them."""
    axes.barh(range(len(values)), values, color=OTHER)
    for place, (value, text) in enumerate(zip(values, labels, strict=True)):
        axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, 1.3 * max(*values, 1e-9))
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Only what carries meaning."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
