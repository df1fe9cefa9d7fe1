"""Accuracy over context length and depth, and rates over layers and heads, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kv_bench.grid import Row

DARK = 0.6  # accuracy above which the cell is dark and its text white


def draw(rows: Sequence[Row], title: str, path: Path | BinaryIO) -> None:
    """One cell per row, depth downwards; cells without a row stay white."""
    contexts = sorted({row.context for row in rows})
    depths = sorted({row.depth for row in rows})
    cells = [[float("nan")] * len(contexts) for _ in depths]
    for row in rows:
        cells[depths.index(row.depth)][contexts.index(row.context)] = row.accuracy
    figure = Figure(
        figsize=(2.6 + 0.85 * len(contexts), 1.7 + 0.42 * len(depths)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(cells, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row in rows:
        axes.text(
            contexts.index(row.context),
            depths.index(row.depth),
            f"{row.accuracy:.0%}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if row.accuracy > DARK else "#222222",
        )
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("depth of the needle")
    mean = sum(row.accuracy for row in rows) / len(rows)
    axes.set_title(f"{title}: {mean:.1%} right", fontsize=10, loc="left")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, format=PercentFormatter(1.0), label="answers that are right")
    figure.savefig(path, dpi=150, format="png")


def draw_rates(rates: Sequence[Sequence[float]], title: str, path: Path | BinaryIO) -> None:
    """One cell per layer (downwards) and query head; brighter is more often."""
    layers, heads = len(rates), len(rates[0])
    figure = Figure(figsize=(2.6 + 0.45 * heads, 1.7 + 0.3 * layers), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(rates, cmap="magma", vmin=0, aspect="auto")
    axes.set_xticks(range(heads))
    axes.set_yticks(range(layers))
    axes.set_xlabel("query head")
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(length=0)
    bar = figure.colorbar(image, format=PercentFormatter(1.0, decimals=1))
    bar.set_label("spans expanded per step")
    figure.savefig(path, dpi=150, format="png")
