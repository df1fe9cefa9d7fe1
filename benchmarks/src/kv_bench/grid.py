"""Results by method, budget, context and place, kept in a folder so that a run can go on."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Generic, TypeVar

from kv_bench.folder import check_settings
from kv_integration.cli.files import write_text
from kv_integration.cli.inputs import parse_budget

Key = tuple[str, int, float]  # label of the variant, context, depth or turn


@dataclass(frozen=True)
class Variant:
    """A method, as one writes it on the command line, with its budget: 1 is one entry and 1.0 the
    whole prompt, so labels tell apart."""

    method: str
    budget: int | float

    @property
    def label(self) -> str:
        """`full`, or the method and its budget."""
        return self.method if self.method == "full" else f"{self.method}-{self.budget}"

    @property
    def stem(self) -> str:
        """The label, fit for a file name."""
        return re.sub(r"[^\w.-]+", "-", self.label).replace("--", "-")


@dataclass(frozen=True)
class Row:
    """Accuracy of one variant at one context length and depth."""

    method: str
    context: int
    depth: float
    budget: int | float
    samples: int
    accuracy: float

    @property
    def variant(self) -> Variant:
        return Variant(self.method, self.budget)

    @property
    def key(self) -> Key:
        return (self.variant.label, self.context, self.depth)


@dataclass(frozen=True)
class TurnRow:
    """Accuracy of one variant at one context length in one turn, counted from 1."""

    method: str
    context: int
    turn: int
    budget: int | float
    samples: int
    accuracy: float

    @property
    def variant(self) -> Variant:
        return Variant(self.method, self.budget)

    @property
    def key(self) -> Key:
        return (self.variant.label, self.context, self.turn)


R = TypeVar("R", Row, TurnRow)
READ: dict[str, Callable[[str], object]] = {
    "method": str,
    "context": int,
    "depth": float,
    "turn": int,
    "budget": parse_budget,
    "samples": int,
    "accuracy": float,
}


class Results(Generic[R]):
    """`results.csv`, `results.json` and `settings.json` in `folder`; rows are of type `kind`.

    The two result files are replaced, whole, whenever rows are added.

    Raises:
        ValueError: the folder holds results of other settings, or a file in it cannot be read.
    """

    def __init__(self, folder: Path, settings: dict[str, object], kind: type[R]) -> None:
        self.folder = folder
        self.kind: type[R] = kind
        self.rows: dict[Key, R] = {}
        check_settings(folder, settings, results="results.csv")
        table = folder / "results.csv"
        if table.exists():
            self.rows = {row.key: row for row in read(table, kind)}

    def has(self, variant: Variant, context: int, place: float) -> bool:
        """Whether the cell at that depth or turn is done."""
        return (variant.label, context, place) in self.rows

    def add(self, rows: Iterable[R]) -> None:
        """Add rows and write all."""
        self.rows.update({row.key: row for row in rows})
        records = [asdict(self.rows[key]) for key in sorted(self.rows)]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns(self.kind), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        write_text(self.folder / "results.csv", text.getvalue())
        write_text(self.folder / "results.json", json.dumps(records, indent=1) + "\n")

    def of(self, variant: Variant) -> list[R]:
        """Rows of one variant, by context and place."""
        return [row for key, row in sorted(self.rows.items()) if key[0] == variant.label]


def columns(kind: type[R]) -> list[str]:
    """Columns of the table that holds rows of that type."""
    return [field.name for field in fields(kind)]


def read(table: Path, kind: type[R]) -> list[R]:
    """Rows of a `results.csv`.

    Raises:
        ValueError: it is not one of rows of type `kind`.
    """
    try:
        with table.open(encoding="utf-8", newline="") as lines:
            return [
                kind(**{name: READ[name](line[name]) for name in columns(kind)})  # type: ignore[arg-type]
                for line in csv.DictReader(lines)
            ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{table} is no table of results: {error!r}") from error
