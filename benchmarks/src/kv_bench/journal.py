"""One line per sample and variant, only ever added to: what a killed run has done stays done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from kv_bench.grid import Variant

JOURNAL = "samples.jsonl"
OK, OUT_OF_MEMORY = "ok", "out of memory"
Key = tuple[str, str, int | None, str, str]


@dataclass(frozen=True)
class Record:
    """What one method with one budget did with one sample.

    task, metric, mode, context, sample, method, budget: what was run; `context` is the length that
    was asked for, None for the task's own. status: `ok` or `out of memory`, which has no figures.
    score: of the metric, in [0, 1]; of perplexity tasks the mean negative log-likelihood per token
    in nats, over `scored_tokens`. entries_attended: of the prompt by one step per KV head, the most
    of any layer; entries_mean: the mean over layers. Bytes are those of the tensors that existed
    after the last answer, per tier; full_kv_bytes is what the keys and values of all tokens seen
    take. prefill: `own`, or `shared` with the other methods of the sample, whose compression
    prefill_s (seconds) then contains; ttft_s (seconds from the prompt to the first token) is known
    only with a prefill of its own. per_token_s: median over the tokens after the first.
    """

    task: str
    metric: str
    mode: str
    context: int | None = None
    sample: str = ""
    method: str = "full"
    budget: int | float = 1.0
    status: str = OK
    score: float | None = None
    questions: list[str] = field(default_factory=list)
    answers: list[list[str]] = field(default_factory=list)
    predictions: list[str] = field(default_factory=list)
    answer_prefix: str = ""
    max_new_tokens: int = 0
    scored_tokens: int | None = None
    depth: float | None = None
    prompt_tokens: int | None = None
    budget_entries: int | None = None
    entries_attended: int | None = None
    entries_mean: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    full_kv_bytes: int | None = None
    bytes_moved: int | None = None
    hit_rate: float | None = None
    prefill: str | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    per_token_s: float | None = None

    @property
    def variant(self) -> Variant:
        return Variant(self.method, self.budget)

    @property
    def key(self) -> Key:
        return (self.task, self.mode, self.context, self.sample, self.variant.label)


class Journal:
    """`samples.jsonl` in `folder`, open for one run at a time.

    A line is written at once and reaches the disk before the next sample starts. One that a kill
    cut short is dropped when the file is opened again, and its sample runs anew.

    Raises:
        ValueError: another run has the folder open, or a line is no record.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / f".{JOURNAL}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"another run is writing to {folder}") from None
        try:
            self.records = read(folder / JOURNAL, repair=True)
            self._file = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except BaseException:
            self._lock.release()
            raise
        self._done = {record.key for record in self.records}

    def has(self, key: Key) -> bool:
        """Whether that sample of that variant is done."""
        return key in self._done

    def add(self, records: Iterable[Record]) -> None:
        """Append `records` and wait until they are on the disk."""
        new = list(records)
        data = b"".join(json.dumps(asdict(record)).encode() + b"\n" for record in new)
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
        self.records += new
        self._done |= {record.key for record in new}

    def close(self) -> None:
        os.close(self._file)
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read(file: Path, *, repair: bool = False) -> list[Record]:
    """The records in `file`, none if it does not exist; a last line without its end is left out.

    repair: cut such a line off the file.

    Raises:
        ValueError: a line is no record.
    """
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if repair and len(whole) < len(data):
        os.truncate(file, len(whole))
    return [_record(line, file, number) for number, line in enumerate(whole.splitlines(), 1)]


def _record(line: bytes, file: Path, number: int) -> Record:
    try:
        return Record(**json.loads(line))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}, line {number} is no record of a sample: {error}") from error


COLUMNS = [column.name for column in fields(Record)]
