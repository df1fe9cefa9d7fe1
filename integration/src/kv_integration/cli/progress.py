"""What is going on, on stderr, while it goes on; nothing when stderr is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Steps:
    """A line per thing that is being done, with a bar for those whose length is known."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,  # drawing must not take time from what is measured
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Steps:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    @contextmanager
    def step(self, text: str, total: int | None = None) -> Iterator[Step]:
        """One thing that takes `total` advances, or a time nobody knows."""
        task = self._bars.add_task(text, total=total)
        try:
            yield Step(self._bars, task)
        finally:
            self._bars.remove_task(task)


class Step:
    """One line of `Steps`."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def advance(self, count: int = 1) -> None:
        """`count` more of the total are done."""
        self._bars.advance(self._task, count)
