"""The figures of `kv-bench report`, each from the rows of a summary; legible in print and in grey.

A method has the same colour, marker and line in every figure. Colours are those of Okabe and Ito,
which people with any kind of colour vision tell apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullLocator, PercentFormatter

from kv_bench.summary import Summary

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F4F24")
MARKERS = "osD^vP*X<>ph"
LINES = ("-", "--", "-.", ":")
FULL: dict[str, Any] = {
    "color": "#222222",
    "marker": "",
    "linestyle": (0, (6, 2)),
    "linewidth": 1.2,
}
OUTLINE: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.4}
MIB = 2**20
MOST_COLUMNS = 3
LEGEND_LINE = 0.17  # inches
SMALL, LARGE = 5.0, 10.0  # markers of the smallest and the largest budget

Value = Callable[[Summary], float | None]


class Styles:
    """How each method is drawn."""

    def __init__(self, methods: Iterable[str]) -> None:
        others = [method for method in dict.fromkeys(methods) if method != "full"]
        self._of: dict[str, dict[str, Any]] = {
            method: {
                "color": COLOURS[at % len(COLOURS)],
                "marker": MARKERS[at % len(MARKERS)],
                "linestyle": LINES[at // len(COLOURS) % len(LINES)],
                "linewidth": 1.4,
                "markersize": 5,
            }
            for at, method in enumerate(others)
        } | {"full": FULL}

    def __getitem__(self, method: str) -> dict[str, Any]:
        return self._of[method]


def score_against_budget(rows: Sequence[Summary], styles: Styles) -> Figure:
    """One panel per context: score over the share of the prompt that a step attends."""
    contexts = ordered(row.context for row in rows)
    figure, panels = grid(len(contexts))
    for axes, context in zip(panels, contexts, strict=True):
        here = [row for row in rows if row.context == context and row.score is not None]
        for method in dict.fromkeys(row.method for row in here):
            own = [row for row in here if row.method == method]
            if method == "full":
                axes.axhline(own[0].score or 0.0, label="full KV", **FULL)
                continue
            points = sorted((share(row), row.score, row.score_se or 0.0) for row in own)
            x, y, error = zip(*points, strict=True)
            axes.errorbar(x, y, yerr=error, capsize=2, label=method, **styles[method])
        axes.set_title(title_of(context), fontsize=9, loc="left")
        axes.set_xlabel("share of the prompt attended per step")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        label_score(axes, rows)
    return finish(figure, panels)


def over_context(
    rows: Sequence[Summary],
    styles: Styles,
    *,
    value: Value,
    label: str,
) -> Figure:
    """One panel per budget: `value` over the context, methods of that budget and full KV."""
    budgets = list(dict.fromkeys(row.budget for row in rows if row.method != "full")) or [1.0]
    figure, panels = grid(len(budgets))
    for axes, budget in zip(panels, budgets, strict=True):
        for method in dict.fromkeys(row.method for row in rows):
            own = [row for row in rows if row.method == method and is_at(row, budget)]
            points = mean_over(own, lambda row: row.prompt_tokens, value)
            if points:
                x, y = zip(*points, strict=True)
                style = styles[method] if method != "full" else {**FULL, "marker": "."}
                axes.plot(x, y, label="full KV" if method == "full" else method, **style)
        axes.set_title(f"budget {budget_text(budget)}", fontsize=9, loc="left")
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    return finish(figure, panels)


def is_at(row: Summary, budget: int | float) -> bool:
    """Whether `row` has that budget; 1 is not 1.0, and full KV goes with every budget."""
    return row.method == "full" or (type(row.budget), row.budget) == (type(budget), budget)


def task_bars(rows: Sequence[Summary], styles: Styles) -> Figure:
    """Mean score over contexts, one group of bars per task; all of one budget, and full KV."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    figure = Figure(figsize=(min(2.4 + 0.16 * len(tasks) * (len(methods) + 1), 14), 3.4))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    width = 0.84 / len(methods)
    for at, method in enumerate(methods):
        places, heights = [], []
        for place, task in enumerate(tasks):
            found = [
                row.score
                for row in rows
                if (row.task, row.method) == (task, method) and row.score is not None
            ]
            if found:
                places.append(place + (at - (len(methods) - 1) / 2) * width)
                heights.append(fmean(found))
        axes.bar(
            places,
            heights,
            width * 0.92,
            label="full KV" if method == "full" else method,
            color=styles[method]["color"],
            hatch=("", "///", "...", "xx")[at % 4],
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_xticks(range(len(tasks)), tasks, rotation=20 if len(tasks) > 4 else 0, fontsize=8)
    axes.set_ylim(0, 1.02)
    label_score(axes, rows)
    return finish(figure, [axes], grid_axis="y")


def pareto(rows: Sequence[Summary], styles: Styles) -> Figure:
    """Mean score over tasks and contexts against bytes on the device, as share of full KV's.

    The line joins the variants that no other beats in both; larger markers are larger budgets.
    """
    figure, (axes,) = grid(1, width=5.6, height=3.8)
    points = []
    for label in dict.fromkeys(row.variant.label for row in rows):
        own = [
            row
            for row in rows
            if row.variant.label == label and row.score is not None and row.device_bytes
        ]
        if own:
            size = fmean((row.device_bytes or 0) / (row.full_kv_bytes or 1) for row in own)
            points.append((size, fmean(row.score or 0.0 for row in own), own[0]))
    sizes = sorted({row.budget for _, _, row in points if row.method != "full"}, key=budget_order)
    diameter = {
        budget: SMALL + rank / max(len(sizes) - 1, 1) * (LARGE - SMALL)
        for rank, budget in enumerate(sizes)
    }
    named: set[str] = set()
    for size, score, row in points:
        style = {**styles[row.method], "linestyle": ""}
        if row.method == "full":
            style |= {"marker": "s", "markersize": SMALL}
        else:
            style |= {"markersize": diameter[row.budget], **OUTLINE}
        axes.plot([size], [score], **style)
        if row.method not in named:
            named.add(row.method)
            text = "full KV" if row.method == "full" else row.method
            axes.plot([], [], label=text, **{**style, "markersize": SMALL + 1})
    for budget, size in diameter.items():
        grey: dict[str, Any] = {"color": "#999999", "marker": "o", "linestyle": "", **OUTLINE}
        axes.plot([], [], label=f"budget {budget_text(budget)}", **grey, markersize=size)
    front = pareto_front([(size, score) for size, score, _ in points])
    axes.plot(*zip(*front, strict=True), color="#999999", linewidth=1, zorder=0)
    axes.set_xlabel("bytes on the device, as share of full KV")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(left=0)
    label_score(axes, rows)
    return finish(figure, [axes])


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, quality) those that no other point beats or equals in both, by cost."""
    front: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or quality > front[-1][1]:
            front.append((cost, quality))
    return front


def share(row: Summary) -> float:
    """Of the prompt that a step attends, mean over layers."""
    return (row.entries_mean or 0.0) / (row.prompt_tokens or 1.0)


def mean_over(rows: Iterable[Summary], x: Value, y: Value) -> list[tuple[float, float]]:
    """Mean of `y` at each context, by the mean of `x` there; rows without either are left out."""
    groups: dict[int | None, list[tuple[float, float]]] = {}
    for row in rows:
        at, of = x(row), y(row)
        if at is not None and of is not None:
            groups.setdefault(row.context, []).append((at, of))
    means = ((fmean(a for a, _ in group), fmean(b for _, b in group)) for group in groups.values())
    return sorted(means)


def ordered(values: Iterable[int | None]) -> list[int | None]:
    """Each once, ascending, None first."""
    return sorted(dict.fromkeys(values), key=lambda value: -1 if value is None else value)


def title_of(context: int | None) -> str:
    return "the task's own length" if context is None else f"{context:,} tokens"


def budget_text(budget: int | float) -> str:
    """A share in percent, a number as it is."""
    return f"{budget:,}" if isinstance(budget, int) else f"{100 * budget:g}%"


def budget_order(budget: int | float) -> tuple[bool, float]:
    """Shares by size, then numbers of entries by size."""
    return isinstance(budget, int), budget


def label_score(axes: Axes, rows: Sequence[Summary]) -> None:
    """The y axis of a score: the metric, if it is one."""
    metrics = {row.metric for row in rows}
    axes.set_ylabel(rows[0].metric if len(metrics) == 1 else "score")
    if not rows[0].lower_is_better:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        return
    axes.set_yscale("log")  # a method that breaks a model must not hide what tells the others apart
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks(FormatStrFormatter("%g"))
    axes.tick_params(axis="y", which="minor", labelsize=7)


def grid(count: int, *, width: float = 3.3, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in rows of three."""
    columns = min(count, MOST_COLUMNS)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns + 1.3, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(itertools.chain(*figure.subplots(lines, columns, squeeze=False)))
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def finish(
    figure: Figure, panels: Sequence[Axes], *, grid_axis: Literal["both", "y"] = "both"
) -> Figure:
    """Grid, spines and one legend beside the panels."""
    handles: dict[str, Any] = {}
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=grid_axis, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
        axes.xaxis.set_minor_locator(NullLocator())
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.set_figheight(max(figure.get_figheight(), LEGEND_LINE * (len(handles) + 1)))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside right upper",
        fontsize=8,
        frameon=False,
    )
    return figure
