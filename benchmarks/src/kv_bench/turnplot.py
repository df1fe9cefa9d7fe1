"""Accuracy over the turns of a conversation as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kv_bench.grid import TurnRow

MARKERS = "osD^vP*X"


def draw(rows: Mapping[str, Sequence[TurnRow]], title: str, path: Path) -> None:
    """One line per label of `rows`, those of a method in one colour."""
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    methods = list(dict.fromkeys(row.method for of_label in rows.values() for row in of_label))
    drawn: dict[str, int] = {}
    for label, of_label in rows.items():
        method = of_label[0].method
        budget = drawn[method] = drawn.get(method, -1) + 1
        axes.plot(
            [row.turn for row in of_label],
            [row.accuracy for row in of_label],
            color=colormaps["tab20"](methods.index(method) % 20),
            marker=MARKERS[budget % len(MARKERS)],
            linestyle="--" if method == "full" else "-",
            markersize=4,
            label=label,
        )
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("turn")
    axes.set_ylabel("answers that are right")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, format="png")
