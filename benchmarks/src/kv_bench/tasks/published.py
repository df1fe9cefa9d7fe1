"""Tasks whose samples are the rows of a published data set, in its order."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kv_bench.tasks.base import Sample, Samples, Task, check_counts
from kv_bench.tasks.data import Row, Source, read_rows
from kv_bench.tasks.truncate import truncate_middle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PublishedTask(Task):
    """A task that reads `source`; `row_id` is the field of a row that names it."""

    row_id: ClassVar[str]

    @property
    @abstractmethod
    def source(self) -> Source:
        """Where the rows are."""

    @abstractmethod
    def sample(self, row: Row) -> Sample:
        """The whole prompt of a row."""

    def samples(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int | None = None,
        count: int | None = None,
        seed: int = 0,
        data: str | Path | None = None,
        text: str | None = None,
    ) -> Samples:
        """The data set's first `count` samples in its order; nothing is drawn.

        Raises:
            ValueError: a wrong `length` or `count`, or `text`, for which there is no use.
        """
        check_counts(length, count)
        if text is not None:
            raise ValueError(f"{self.name} has texts of its own and takes no text")
        rows = read_rows(data, self.source, task=self.name)[:count]

        def make(index: int) -> Sample:
            return truncate_middle(tokenizer, self.sample(rows[index]), length)

        return Samples([str(row[self.row_id]) for row in rows], make)
