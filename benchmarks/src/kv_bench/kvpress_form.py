"""Results in the form of kvpress' `evaluation`, one folder per task, context, method and budget.

`predictions.csv` has one row per question, `metrics.json` maps a task to its metric in percent,
`config.yaml` holds the fields of kvpress' configuration as far as they mean something here. A
budget of 0.1 is a compression ratio of 0.9.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from kv_bench.journal import OK, Record
from kv_bench.runner import AWARE
from kv_bench.summary import Summary
from kv_integration.cli.files import write_text

COLUMNS = (
    *("question", "answer", "answer_prefix", "max_new_tokens", "task", "sample"),
    *("predicted_answer", "compression_ratio", "score"),
)


def write_kvpress_form(
    folder: Path,
    rows: Sequence[Summary],
    records: Sequence[Record],
    *,
    model: str,
    device: str,
    seed: int,
    model_kwargs: Mapping[str, object],
) -> list[Path]:
    """A folder in `folder` for each row that has answers; returns them."""
    written = []
    for row in rows:
        own = [
            record
            for record in records
            if record.status == OK
            and record.predictions
            and (record.task, record.mode, record.context) == (row.task, row.mode, row.context)
            and record.variant == row.variant
        ]
        if not own or row.score is None:
            continue
        ratio = compression_ratio(row)
        place = folder / name_of(row, ratio, model)
        write_text(place / "predictions.csv", predictions(own, ratio))
        metrics = {row.task: {row.metric: round(100 * row.score, 2)}}
        write_text(place / "metrics.json", json.dumps(metrics, indent=4) + "\n")
        config = {
            "dataset": row.task,
            "data_dir": None,
            "model": model,
            "device": device,
            "press_name": press_name(row),
            "compression_ratio": ratio,
            "fraction": 1.0,
            "max_new_tokens": own[0].max_new_tokens,
            "max_context_length": row.context,
            "query_aware": row.mode == AWARE,
            "press_init_command": f"{row.method}(budget={row.budget})",
            "model_kwargs": dict(model_kwargs),
            "seed": seed,
        }
        write_text(place / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        written.append(place)
    return written


def compression_ratio(row: Summary) -> float:
    """Share of the prompt that the budget takes away."""
    if isinstance(row.budget, float):
        return round(1 - row.budget, 6)
    return round(1 - (row.entries_asked or 0.0) / (row.prompt_tokens or 1.0), 6)


def press_name(row: Summary) -> str:
    return "no_press" if row.method == "full" else row.method


def name_of(row: Summary, ratio: float, model: str) -> str:
    """The folder's name, in kvpress' order, so that no two rows have the same."""
    exact = f"{ratio:.2f}" if round(ratio, 2) == ratio else f"{ratio:g}"
    parts = [row.task, model.replace("/", "--"), press_name(row), exact]
    if row.context is not None:
        parts.append(f"max_context{row.context}")
    if isinstance(row.budget, int):
        parts.append(f"budget{row.budget}")
    if row.mode == AWARE:
        parts.append("query_aware")
    return "__".join(parts)


def predictions(records: Sequence[Record], ratio: float) -> str:
    """The text of `predictions.csv`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in records:
        for question, answers, predicted in zip(
            record.questions, record.answers, record.predictions, strict=True
        ):
            writer.writerow(
                {
                    "question": question,
                    "answer": answers,  # as pandas writes a list, which kvpress' scorers read
                    "answer_prefix": record.answer_prefix,
                    "max_new_tokens": record.max_new_tokens,
                    "task": record.task,
                    "sample": record.sample,
                    "predicted_answer": predicted,
                    "compression_ratio": ratio,
                    "score": record.score,
                }
            )
    return text.getvalue()
