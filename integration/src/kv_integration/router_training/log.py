"""What a run leaves to look at: a CSV with a row per step, and a figure of the four losses."""

from __future__ import annotations

import csv
from pathlib import Path

LOSSES = ("distill", "zoom", "recon", "budget")
TITLES = (
    "KL to full KV (nats)",
    "zoom: weighted cross-entropy",
    "relative error of the span bases",
    "expansions and rank",
)
COLUMNS = (
    *("step", "length", "learning_rate", "cost_weight", "loss", *LOSSES),
    *("expanded", "rank", "threshold", "validation"),
)


class Log:
    """`log.csv` in a run's folder.

    Args:
        path: the file; rows of steps beyond `step`, which will be run again, are dropped.
        step: steps that are done.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [row for row in read(path) if int(row["step"]) <= step] if path.exists() else []
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)

    def add(self, row: dict[str, float | int | None]) -> None:
        """Append a step."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a log."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def plot(log: Path, path: Path) -> None:
    """Draw the four losses of the CSV `log` over the steps to `path`, as its suffix says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    rows = read(log)
    steps = [int(row["step"]) for row in rows]
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name, title in zip(figure.subplots(2, 2).flat, LOSSES, TITLES, strict=True):
        values = [float(row[name]) for row in rows]
        axes.plot(steps, values, color="#a9c9e8", linewidth=0.7)
        axes.plot(steps, smooth(values), color="#2b6cb0", linewidth=1.5)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        if values and min(values) > 0:
            axes.set_yscale("log")
    figure.supxlabel("step", fontsize=9)
    figure.savefig(path, dpi=130, format=path.suffix[1:].lower())


def smooth(values: list[float], keep: float = 0.95) -> list[float]:
    """Running mean that forgets."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else keep * out[-1] + (1 - keep) * value)
    return out
