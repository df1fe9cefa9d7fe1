"""One sample after the other: what is missing is run, and noted before the next one starts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from kv_bench.ask import Reply, is_out_of_memory, release, replies
from kv_bench.grid import Variant
from kv_bench.journal import OUT_OF_MEMORY, Journal, Record
from kv_bench.tasks import (
    Encoded,
    PerplexityTask,
    Sample,
    Task,
    encode,
    negative_log_likelihoods,
)
from kv_bench.variants import Registry, make
from kv_integration import Report, attach
from kv_integration.cli.inputs import Loaded, check_positions

AWARE, AGNOSTIC = "aware", "agnostic"
MODES = (AWARE, AGNOSTIC)
OWN, SHARED = "own", "shared"


class Runner(ABC):
    """Runs a task's samples; a subclass knows how one sample is measured.

    blank: a record of the task without sample, method and figures. ids: of all samples. prefill:
    `shared` by all methods of a sample, or each its `own`.
    """

    def __init__(self, loaded: Loaded, registry: Registry, blank: Record, prefill: str) -> None:
        self.loaded, self.registry, self.blank, self.prefill = loaded, registry, blank, prefill
        self.ids: Sequence[str] = ()

    @abstractmethod
    def measured(self, at: int, todo: Sequence[Record]) -> list[Record]:
        """Sample number `at`, measured with the methods of the records `todo`."""

    def run(self, at: int, variants: Sequence[Variant], journal: Journal) -> None:
        """Run what `journal` lacks of sample number `at`, and note it there.

        A sample for which there is no memory is noted as such, after each method had its try alone.
        """
        blank = [
            replace(self.blank, sample=self.ids[at], method=v.method, budget=v.budget)
            for v in variants
        ]
        todo = [record for record in blank if not journal.has(record.key)]
        for group in [todo] if self.prefill == SHARED else [[record] for record in todo]:
            if group:
                journal.add(self._with_memory(at, group))

    def _with_memory(self, at: int, todo: Sequence[Record]) -> list[Record]:
        found = self._tried(at, todo)
        if found is not None:
            return found
        release()
        if len(todo) == 1:
            return [replace(todo[0], status=OUT_OF_MEMORY)]
        return [record for one in todo for record in self._with_memory(at, [one])]

    def _tried(self, at: int, todo: Sequence[Record]) -> list[Record] | None:
        """None if memory ran out; what the attempt held is let go with the error's traceback."""
        try:
            return self.measured(at, todo)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None


class Answers(Runner):
    """A task whose questions are answered. max_new_tokens: instead of the samples' own."""

    def __init__(
        self,
        loaded: Loaded,
        registry: Registry,
        blank: Record,
        prefill: str,
        *,
        task: Task,
        max_new_tokens: int | None,
        **asked: Any,
    ) -> None:
        super().__init__(loaded, registry, blank, prefill)
        self.task, self.max_new_tokens = task, max_new_tokens
        self.samples = task.samples(loaded.tokenizer, **asked)
        self.ids = self.samples.ids

    def measured(self, at: int, todo: Sequence[Record]) -> list[Record]:
        sample = self.samples[at]
        encoded = encode(self.loaded.tokenizer, sample)
        new = self.max_new_tokens or sample.max_new_tokens
        self._check(sample, encoded, new)
        found = replies(
            self.loaded.model,
            self.loaded.tokenizer,
            encoded,
            [make(record.variant, self.registry) for record in todo],
            aware=self.blank.mode == AWARE,
            max_new_tokens=new,
            stop=sample.stop,
        )
        return [
            self._record(record, reply, sample, new)
            for record, reply in zip(todo, found, strict=True)
        ]

    def _check(self, sample: Sample, encoded: Encoded, new: int) -> None:
        try:
            answers = encoded.tokens(new) - encoded.tokens(0)
            check_positions(self.loaded.model, encoded.tokens(0), answers)
        except ValueError as error:
            raise ValueError(f"{self.task.name}, sample {sample.id}: {error}") from error

    def _record(self, record: Record, reply: Reply, sample: Sample, new: int) -> Record:
        return replace(
            record,
            score=self.task.score(reply.predictions, sample),
            questions=list(sample.questions),
            answers=[list(accepted) for accepted in sample.answers],
            predictions=list(reply.predictions),
            answer_prefix=sample.answer_prefix,
            max_new_tokens=new,
            depth=sample.extra.get("depth"),
            prefill=OWN if reply.shared == 1 else SHARED,
            prefill_s=reply.prefill_s,
            ttft_s=reply.ttft_s,
            per_token_s=reply.per_token_s,
            **held(reply.report),
        )


class Likelihoods(Runner):
    """A task whose texts are scored, each method with a prefill of its own."""

    def __init__(
        self,
        loaded: Loaded,
        registry: Registry,
        blank: Record,
        *,
        task: PerplexityTask,
        **asked: Any,
    ) -> None:
        # the continuation is never compressed, so there is no query-aware mode
        super().__init__(loaded, registry, replace(blank, mode=AGNOSTIC), OWN)
        self.texts = task.texts(loaded.tokenizer, **asked)
        self.ids = [text.id for text in self.texts]

    def measured(self, at: int, todo: Sequence[Record]) -> list[Record]:
        text = self.texts[at]
        context, scored = len(text.context_ids), len(text.continuation_ids)
        check_positions(self.loaded.model, context, scored)
        found = []
        with attach(self.loaded.model, self.loaded.tokenizer) as kv:
            for record in todo:
                cache = kv.cache(make(record.variant, self.registry), prompt_length=context)
                times = [time.perf_counter()]
                losses = negative_log_likelihoods(
                    self.loaded.model, text, cache, on_token=partial(_note, times)
                )
                first, *later = [after - before for before, after in pairwise(times)]
                figures = replace(
                    record,
                    score=float(losses.mean()),
                    scored_tokens=scored,
                    prefill=OWN,
                    prefill_s=first,
                    ttft_s=first,
                    per_token_s=median(later) if later else None,
                    **held(cache.report()),
                )
                found.append(figures)
        return found


def _note(times: list[float]) -> None:
    times.append(time.perf_counter())


def held(report: Report) -> dict[str, Any]:
    """What a record takes from a cache's report."""
    entries = [layer.entries_attended for layer in report.layers if layer.kind == "compressed"]
    return {
        "prompt_tokens": report.prompt_tokens,
        "budget_entries": report.budget_entries,
        "entries_attended": report.entries_attended,
        "entries_mean": fmean(entries) if entries else None,
        "device_bytes": report.device_bytes,
        "host_bytes": report.host_bytes,
        "disk_bytes": report.disk_bytes,
        "full_kv_bytes": report.full_kv_bytes,
        "bytes_moved": report.bytes_moved,
        "hit_rate": report.hit_rate,
    }


def make_runner(
    task: Task | PerplexityTask,
    loaded: Loaded,
    registry: Registry,
    blank: Record,
    prefill: str,
    *,
    max_new_tokens: int | None,
    **asked: Any,
) -> Runner:
    """The runner that `task` needs; `asked` goes to its `samples` or `texts`."""
    if isinstance(task, PerplexityTask):
        return Likelihoods(loaded, registry, blank, task=task, **asked)
    return Answers(
        loaded, registry, blank, prefill, task=task, max_new_tokens=max_new_tokens, **asked
    )
