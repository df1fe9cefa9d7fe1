"""The field's tasks by name."""

from __future__ import annotations

from kv_bench.tasks.base import (
    MissingData,
    PerplexityTask,
    Sample,
    Samples,
    ScoredText,
    Task,
)
from kv_bench.tasks.prompt import Encoded, encode

__all__ = [
    "TASKS",
    "Encoded",
    "MissingData",
    "PerplexityTask",
    "Sample",
    "Samples",
    "ScoredText",
    "Task",
    "encode",
    "task_named",
]

TASKS: dict[str, Task | PerplexityTask] = {}


def task_named(name: str) -> Task | PerplexityTask:
    """The task of that name.

    Raises:
        ValueError: there is none; the text lists what exists.
    """
    try:
        return TASKS[name]
    except KeyError:
        raise ValueError(f"there is no task {name!r}; there are {', '.join(TASKS)}") from None
