"""`kv-bench peers`: this project beside kvpress and transformers' caches, in one run.

kvpress needs another transformers than this project, so each runs in a process of its own
interpreter; the two take turns, one prompt each, and never run at the same time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kv_bench import measure, peer_worker, subject
from kv_bench.runner import AGNOSTIC, AWARE
from kv_bench.tasks import Encoded, Sample, Task, encode, task_named
from kv_bench.variants import parse_lengths
from kv_integration.budget import budget_entries
from kv_integration.cli.inputs import DTYPES, Loaded, parse_budget
from kv_integration.cli.progress import Steps

REPLY_S = 600  # the first quantized cache compiles its kernels
# ours, theirs
PAIRS = (
    ("full", "transformers:dynamic"),
    ("full", "transformers:offloaded"),
    ("full", "transformers:quantized-quanto"),
    ("full", "transformers:quantized-hqq"),
    ("snapkv", "kvpress:snapkv"),
    ("snapkv", "kvpress:snapkv:nope"),
    ("pyramidkv", "kvpress:pyramidkv"),
    ("pyramidkv", "kvpress:pyramidkv:nope"),
    ("chunkkv", "kvpress:chunkkv"),
    ("chunkkv", "kvpress:chunkkv:nope"),
    ("streamingllm", "kvpress:streamingllm"),
    ("tova", "kvpress:tova"),
    ("tova", "kvpress:tova:nope"),
)


@click.command()
@click.option(
    "--python",
    "interpreter",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Python of an environment with kvpress; `tox run -e peers` makes one.",
)
@click.option(
    "--shape",
    type=click.Choice(["embedded", *subject.SHAPES]),
    default="embedded",
    show_default=True,
    help="The embedded model, or random weights of a known shape.",
)
@click.option("--layers", type=click.IntRange(min=1), help="Of a random model.  [default: all]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option("--contexts", default="2048", show_default=True, metavar="TOKENS")
@click.option("--budget", default="0.1", show_default=True, help="Entries or share of the context.")
@click.option(
    "--mode",
    type=click.Choice([AGNOSTIC, AWARE]),
    default=AGNOSTIC,
    show_default=True,
    help="Whether the context is compressed alone, or with the question.",
)
@click.option("--samples", type=click.IntRange(min=2), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(min=3), default=16, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@measure.json_option
def peers(
    interpreter: Path,
    shape: str,
    layers: int | None,
    dtype: str,
    contexts: str,
    budget: str,
    mode: str,
    samples: int,
    tokens: int,
    threads: int,
    json_file: Path | None,
) -> None:
    """Accuracy, time and bytes of ours beside kvpress and transformers, entries kept alike.

    Theirs runs first and ours keeps what theirs kept. The first prompt of each cell warms up and
    counts for accuracy alone.
    """
    if not interpreter.is_file():
        raise ValueError(f"--python: there is no {interpreter}; `tox run -e peers` makes one")
    granted, lengths = parse_budget(budget), parse_lengths(contexts)
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        loaded = subject.load(shape, layers=layers, dtype=DTYPES[dtype])
        folder = stack.enter_context(saved(loaded, shape))
        settings = {"op": "load", "model": str(folder), "dtype": dtype, "threads": threads}
        own = stack.enter_context(process([sys.executable, "-m", peer_worker.__name__]))
        other = stack.enter_context(process([str(interpreter), "-I", str(peer_worker.__file__)]))
        versions = {"ours": own.ask(settings), "theirs": other.ask(settings)}
        if "kvpress" not in versions["theirs"]:
            raise ValueError(f"--python: {interpreter} has no kvpress")
        task = task_named("niah_single")
        assert isinstance(task, Task)
        steps = stack.enter_context(Steps())
        for length in lengths:
            prompts = make_prompts(task, loaded, length, samples)
            kept = budget_entries(granted, min(len(encoded.context) for _, encoded in prompts))
            pairs = [pair for pair in PAIRS if shape == "embedded" or not pair[1].endswith(":nope")]
            with steps.step(f"{length} tokens", total=len(pairs) * samples) as step:
                for ours, theirs in pairs:
                    pair = Pair(Side(f"ours:{ours}", own), Side(theirs, other), mode == AWARE)
                    for number, (sample, encoded) in enumerate(prompts):
                        pair.run(number, sample, encoded, kept=kept, tokens=tokens)
                        step.advance()
                    missing |= pair.missing
                    scored = {"task": task, "loaded": loaded} if shape == "embedded" else None
                    where = {"shape": shape, "context": length, "mode": mode}
                    rows.append({**where, **pair.row(scored)})
    measure.publish(rows, json_file, extra={"versions": versions, "missing": missing})
    for side, why in missing.items():
        click.echo(f"{side}: not measured, {why}")
    click.echo(json.dumps(versions))


class Worker:
    """A process that answers one request at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """The reply to `request`.

        Raises:
            ClickException: the process has ended, or took too long; its own words are on stderr.
        """
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("a worker needs pipes")
        limit = threading.Timer(REPLY_S, self.process.kill)
        limit.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        if not line:
            raise click.ClickException(
                f"{self.process.args!r} ended with {self.process.wait()} at "
                f"{request.get('side', request['op'])}; a reply may take {REPLY_S} s"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def process(command: Sequence[str]) -> Iterator[Worker]:
    """A worker started by `command`; ended with the block."""
    # a thread that waits for its turn must not spin while the other process is measured
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as started:
        try:
            yield Worker(started)
        finally:
            started.terminate()


@dataclass
class Side:
    """One way to hold a prompt, and what was found of it."""

    name: str
    worker: Worker
    replies: list[dict[str, Any]] = field(default_factory=list)

    def run(self, encoded: Encoded, *, kept: int, tokens: int, aware: bool) -> dict[str, Any]:
        reply = self.worker.ask(
            {
                "op": "run",
                "side": self.name,
                "kept": kept,
                "context": encoded.context,
                "question": encoded.questions[0],
                "tokens": tokens,
                "aware": aware,
            }
        )
        self.replies.append(reply)
        return reply

    @property
    def unavailable(self) -> str | None:
        """Why it could not be measured."""
        return next((r["unavailable"] for r in self.replies if "unavailable" in r), None)


@dataclass
class Pair:
    """Ours and theirs over the same prompts, taking turns."""

    ours: Side
    theirs: Side
    aware: bool
    samples: list[Sample] = field(default_factory=list)

    def run(self, number: int, sample: Sample, encoded: Encoded, *, kept: int, tokens: int) -> None:
        self.samples.append(sample)
        asked: dict[str, Any] = {"tokens": tokens, "aware": self.aware}
        if number == 0:  # unmeasured: tells what theirs keeps, which ours then keeps, too
            found = self.theirs.run(encoded, kept=kept, **asked).get("kept")
            self.kept = kept if not found else round(statistics.fmean(found))
            self.ours.run(encoded, kept=self.kept, **asked)
            return
        order = [(self.theirs, kept), (self.ours, self.kept)]
        for side, entries in order if number % 2 else reversed(order):
            if side.unavailable is None:
                side.run(encoded, kept=entries, **asked)

    @property
    def missing(self) -> dict[str, str]:
        return {s.name: s.unavailable for s in (self.ours, self.theirs) if s.unavailable}

    def row(self, scored: Mapping[str, Any] | None) -> dict[str, Any]:
        """Figures of both, and ours over theirs; accuracy where `scored` says how."""
        own, other = (figures(side, self.samples, scored) for side in (self.ours, self.theirs))
        row: dict[str, Any] = {"ours": self.ours.name, "theirs": self.theirs.name}
        for name in ("kept", "accuracy", "ttft_ms", "token_ms", "live_kib"):
            row[name], row[f"their_{name}"] = own.get(name), other.get(name)
        for name in ("ttft_ms", "token_ms", "live_kib"):
            measured = name in own and name in other
            row[f"{name.split('_')[0]}_ratio"] = own[name] / other[name] if measured else None
        return row


def figures(
    side: Side, samples: Sequence[Sample], scored: Mapping[str, Any] | None
) -> dict[str, float]:
    """Means over prompts of what was kept and held, medians of the times."""
    if side.unavailable is not None:
        return {}
    timed = side.replies[1:]
    found = {
        "kept": statistics.fmean(n for reply in timed for n in reply["kept"]),
        "ttft_ms": 1e3 * statistics.median(reply["ttft_s"] for reply in timed),
        "token_ms": 1e3 * statistics.median(s for reply in timed for s in reply["steps_s"]),
        "live_kib": statistics.fmean(reply["live_bytes"] for reply in timed) / 2**10,
    }
    if scored is not None:
        task, tokenizer = scored["task"], scored["loaded"].tokenizer
        texts = [tokenizer.decode(r["tokens"], skip_special_tokens=True) for r in side.replies]
        pairs = zip(texts, samples, strict=True)
        found["accuracy"] = statistics.fmean(task.score([text], sample) for text, sample in pairs)
    return found


def make_prompts(
    task: Task, loaded: Loaded, length: int, samples: int
) -> list[tuple[Sample, Encoded]]:
    """Needles of one length."""
    drawn = task.samples(loaded.tokenizer, length=length, count=samples, seed=0)
    return [(sample, encode(loaded.tokenizer, sample)) for sample in drawn]


@contextmanager
def saved(loaded: Loaded, shape: str) -> Iterator[Path]:
    """A folder that both sides load the same weights from."""
    if shape == "embedded":
        yield loaded.folder
        return
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        yield Path(folder)
