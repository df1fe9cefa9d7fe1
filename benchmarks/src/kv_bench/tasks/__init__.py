"""The field's tasks by name.

`TASKS` holds what is answered and scored (`Task`) and what is scored as it is (`PerplexityTask`);
`GROUPS` names the benchmarks they make up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kv_bench.tasks.base import (
    MissingData,
    PerplexityTask,
    Sample,
    Samples,
    ScoredText,
    Task,
)
from kv_bench.tasks.gsm8k import Gsm8k
from kv_bench.tasks.infinitebench import INFINITEBENCH_TASKS
from kv_bench.tasks.longbench import LONGBENCH_TASKS
from kv_bench.tasks.niah import NIAH_TASKS
from kv_bench.tasks.perplexity import Perplexity, negative_log_likelihoods, perplexity
from kv_bench.tasks.prompt import Encoded, encode
from kv_bench.tasks.ruler.niah import NIAH_TASKS as RULER_NIAH_TASKS
from kv_bench.tasks.ruler.qa import QA_TASKS
from kv_bench.tasks.ruler.variable_tracking import VariableTracking
from kv_bench.tasks.ruler.word_counts import CommonWords, FrequentWords

__all__ = [
    "GROUPS",
    "TASKS",
    "Encoded",
    "MissingData",
    "PerplexityTask",
    "Sample",
    "Samples",
    "ScoredText",
    "Task",
    "encode",
    "expand",
    "known_tasks",
    "negative_log_likelihoods",
    "perplexity",
    "task_named",
]

_RULER = (*RULER_NIAH_TASKS, VariableTracking(), CommonWords(), FrequentWords(), *QA_TASKS)
_GROUPED: dict[str, tuple[Task | PerplexityTask, ...]] = {
    "niah": NIAH_TASKS,
    "ruler": _RULER,
    "longbench": LONGBENCH_TASKS,
    "infinitebench": INFINITEBENCH_TASKS,
}

TASKS: dict[str, Task | PerplexityTask] = {
    task.name: task for tasks in (*_GROUPED.values(), (Gsm8k(), Perplexity())) for task in tasks
}
GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(task.name for task in tasks) for group, tasks in _GROUPED.items()
}


def known_tasks() -> str:
    """All tasks and groups, for errors."""
    return f"there are {', '.join(TASKS)}; groups: {', '.join(GROUPS)}"


def task_named(name: str, **settings: Any) -> Task | PerplexityTask:
    """The task of that name, with some of its settings changed, e.g. `depths=11` or `shots=25`.

    Raises:
        ValueError: there is no such task or setting; the text lists what exists.
    """
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; {known_tasks()}")
    task: Any = TASKS[name]
    known = [field.name for field in dataclasses.fields(task) if field.name != "name"]
    for setting in settings:
        if setting not in known:
            raise ValueError(f"{name} has no setting {setting!r}; it has {', '.join(known)}")
    changed: Task | PerplexityTask = dataclasses.replace(task, **settings)
    return changed


def expand(name: str) -> tuple[str, ...]:
    """Names of the tasks that `name`, a task or a group, stands for.

    Raises:
        ValueError: there is neither; the text lists what exists.
    """
    if name in GROUPS:
        return GROUPS[name]
    task_named(name)
    return (name,)
