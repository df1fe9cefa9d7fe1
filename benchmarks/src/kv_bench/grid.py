"""Results over method, budget, context and depth, kept in a folder so that a run can go on."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kv_bench.folder import check_settings
from kv_integration.cli.files import write_text
from kv_integration.cli.inputs import parse_budget

Key = tuple[str, int, float]  # label of the variant, context, depth


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


COLUMNS = [field.name for field in fields(Row)]


class Results:
    """`results.csv`, `results.json` and `settings.json` in `folder`.

    The two result files are replaced, whole, whenever rows are added.

    Raises:
        ValueError: the folder holds results of other settings, or a file in it cannot be read.
    """

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self.folder = folder
        self.rows: dict[Key, Row] = {}
        check_settings(folder, settings, results="results.csv")
        table = folder / "results.csv"
        if table.exists():
            self.rows = {row.key: row for row in read(table)}

    def has(self, variant: Variant, context: int, depth: float) -> bool:
        """Whether that cell is done."""
        return (variant.label, context, depth) in self.rows

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows and write all."""
        self.rows.update({row.key: row for row in rows})
        records = [asdict(self.rows[key]) for key in sorted(self.rows)]
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        write_text(self.folder / "results.csv", text.getvalue())
        write_text(self.folder / "results.json", json.dumps(records, indent=1) + "\n")

    def of(self, variant: Variant) -> list[Row]:
        """Rows of one variant, by context and depth."""
        return [row for key, row in sorted(self.rows.items()) if key[0] == variant.label]


def read(table: Path) -> list[Row]:
    """Rows of a `results.csv`.

    Raises:
        ValueError: it is not one.
    """
    try:
        with table.open(encoding="utf-8", newline="") as lines:
            return [
                Row(
                    method=line["method"],
                    context=int(line["context"]),
                    depth=float(line["depth"]),
                    budget=parse_budget(line["budget"]),
                    samples=int(line["samples"]),
                    accuracy=float(line["accuracy"]),
                )
                for line in csv.DictReader(lines)
            ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{table} is no table of results: {error!r}") from error
