"""From records of samples to one row per task, mode, context, method and budget."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kv_bench.grid import Variant
from kv_bench.journal import OK, Record
from kv_integration.cli.files import write_text

PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Summary:
    """All samples of one variant.

    samples: those with a score; failed: those that ran out of memory. score: mean over samples, for
    perplexity that of all scored tokens together; score_se: its standard error, None for
    perplexity and with fewer than two samples. Entries and bytes are means over samples, times
    medians; None where no sample has the figure. entries_reached: attended over asked. hit_rate:
    share of the retrieved entries that were on the device already; moved_per_token: bytes between
    tiers over scored tokens, of perplexity alone, where each of them is a step.
    """

    task: str
    metric: str
    mode: str
    context: int | None
    method: str
    budget: int | float
    samples: int
    failed: int
    score: float | None
    score_se: float | None
    prompt_tokens: float | None
    entries_asked: float | None
    entries_attended: float | None
    entries_mean: float | None
    entries_reached: float | None
    device_bytes: float | None
    host_bytes: float | None
    disk_bytes: float | None
    full_kv_bytes: float | None
    hit_rate: float | None
    moved_per_token: float | None
    prefill: str | None
    prefill_s: float | None
    ttft_s: float | None
    per_token_s: float | None

    @property
    def variant(self) -> Variant:
        return Variant(self.method, self.budget)

    @property
    def lower_is_better(self) -> bool:
        return self.metric == PERPLEXITY


COLUMNS = [field.name for field in fields(Summary)]


def summarise(records: Iterable[Record]) -> list[Summary]:
    """One row per variant, in the order in which they first appear."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        group = (record.task, record.mode, record.context, record.variant.label)
        groups.setdefault(group, []).append(record)
    return [_summary(group) for group in groups.values()]


def _summary(records: Sequence[Record]) -> Summary:
    done = [record for record in records if record.status == OK]
    first = records[0]

    def over(
        name: str, reduce: Callable[[Sequence[float]], float] = statistics.fmean
    ) -> float | None:
        found = [x for record in done if (x := getattr(record, name)) is not None]
        return reduce(found) if found else None

    asked, attended = over("budget_entries"), over("entries_attended")
    moved, scored = over("bytes_moved"), over("scored_tokens")
    score, error = _perplexity(done) if first.metric == PERPLEXITY else _mean(done)
    prefills = sorted({record.prefill for record in done if record.prefill is not None})
    return Summary(
        task=first.task,
        metric=first.metric,
        mode=first.mode,
        context=first.context,
        method=first.method,
        budget=first.budget,
        samples=len(done),
        failed=len(records) - len(done),
        score=score,
        score_se=error,
        prompt_tokens=over("prompt_tokens"),
        entries_asked=asked,
        entries_attended=attended,
        entries_mean=over("entries_mean"),
        entries_reached=attended / asked if asked and attended is not None else None,
        device_bytes=over("device_bytes"),
        host_bytes=over("host_bytes"),
        disk_bytes=over("disk_bytes"),
        full_kv_bytes=over("full_kv_bytes"),
        hit_rate=over("hit_rate"),
        moved_per_token=moved / scored if scored and moved is not None else None,
        prefill=" and ".join(prefills) or None,
        prefill_s=over("prefill_s", statistics.median),
        ttft_s=over("ttft_s", statistics.median),
        per_token_s=over("per_token_s", statistics.median),
    )


def _mean(records: Sequence[Record]) -> tuple[float | None, float | None]:
    scores = [record.score for record in records if record.score is not None]
    if not scores:
        return None, None
    error = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return statistics.fmean(scores), error


def _perplexity(records: Sequence[Record]) -> tuple[float | None, float | None]:
    """exp of the mean negative log-likelihood over all scored tokens."""
    pairs = [(r.score, r.scored_tokens) for r in records if r.score is not None and r.scored_tokens]
    if not pairs:
        return None, None
    tokens = sum(count for _, count in pairs)
    return math.exp(sum(score * count for score, count in pairs) / tokens), None


def write_summary(folder: Path, rows: Sequence[Summary], about: Mapping[str, object]) -> None:
    """`summary.csv`, and `summary.json` with `about`: command, settings, environment."""
    records = [asdict(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(folder / "summary.csv", text.getvalue())
    content = {**about, "rows": records}
    write_text(folder / "summary.json", json.dumps(content, indent=1) + "\n")
