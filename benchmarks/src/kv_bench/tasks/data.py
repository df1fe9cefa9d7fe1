"""Rows of data sets: from local JSON Lines, or from the Hugging Face hub by `datasets`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_bench.tasks.base import MissingData

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Where one part of a data set is published and what a row of it holds.

    part: file name without ".jsonl". hub: the data set's id on the hub. published: arguments of
    `datasets.load_dataset` for it. mirror: arguments, besides the id, for another id with the same
    rows. fields: names that each row must have. page: where a person gets the files.
    """

    part: str
    hub: str
    published: Mapping[str, Any]
    mirror: Mapping[str, Any]
    fields: tuple[str, ...]
    page: str

    def describe(self) -> str:
        fields = ", ".join(self.fields)
        return f"get {self.part}.jsonl from {self.page}: an object per line with {fields}"


def read_rows(data: str | Path | None, source: Source, *, task: str) -> Sequence[Row]:
    """The rows of `source`.

    Args:
        data: a JSON Lines file; a folder that has the part's file in it or in its folder `data`;
            the id of another data set on the hub; None for the published one.
        task: for errors.

    Raises:
        MissingData: the data are not there, or lack a field.
    """
    if data is not None and Path(data).exists():
        file = _file(Path(data), source, task)
        rows: Sequence[Row] = _read_lines(file, task)
        where = str(file)
    elif data is not None and not _is_hub_id(data):
        raise MissingData(f"{task}: there is no file or folder {data}; {source.describe()}")
    else:
        rows = _from_hub(data, source, task)
        where = str(data or source.hub)
    if not rows:
        raise MissingData(f"{task}: {where} has no rows; {source.describe()}")
    for at, row in enumerate(rows, 1):
        missing = [field for field in source.fields if field not in row]
        if missing:
            raise MissingData(
                f"{task}: row {at} of {where} has no {', '.join(missing)}; {source.describe()}"
            )
    return rows


def _is_hub_id(data: str | Path) -> bool:
    owner, slash, rest = data.partition("/") if isinstance(data, str) else ("", "", "")
    return bool(slash and owner and rest) and "/" not in rest and not owner.startswith((".", "~"))


def _file(path: Path, source: Source, task: str) -> Path:
    if path.is_file():
        return path
    tried = [path / f"{source.part}.jsonl", path / "data" / f"{source.part}.jsonl"]
    for file in tried:
        if file.is_file():
            return file
    raise MissingData(f"{task}: there is no {' or '.join(map(str, tried))}; {source.describe()}")


def _read_lines(file: Path, task: str) -> list[Row]:
    rows: list[Row] = []
    with file.open(encoding="utf-8") as lines:
        for at, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise MissingData(f"{task}: line {at} of {file} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise MissingData(f"{task}: line {at} of {file} is no JSON object")
            rows.append(row)
    return rows


def _from_hub(data: str | Path | None, source: Source, task: str) -> Sequence[Row]:
    try:
        import datasets
    except ImportError as error:
        raise MissingData(
            f"{task} takes its data from the hub by `datasets`, which is not installed: "
            f"pip install 'kv-bench[data]'. Or {source.describe()}, and name the file or folder"
        ) from error
    arguments = source.published if data is None else {"path": str(data), **source.mirror}
    try:
        return list(datasets.load_dataset(**arguments))
    except Exception as error:  # offline, no such data set, no such file in it: all end the same
        raise MissingData(
            f"{task}: `datasets` cannot load {data or source.hub} ({type(error).__name__}: "
            f"{error}). Or {source.describe()}, and name the file or folder"
        ) from error
