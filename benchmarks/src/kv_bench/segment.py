"""`kv-bench segment`: tokens per second and temporary memory of each way to segments."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from nltk.tokenize.punkt import PunktSentenceTokenizer
from numpy.typing import NDArray

from kv_bench.measure import equal, json_option, milliseconds, peak_numpy_bytes, publish
from kv_integration.cli.inputs import read_text
from kv_integration.haystack import topics
from kv_segment import by_delimiters, by_punctuation, by_surprisal, fixed, sentences

VOCABULARY = 128256
DELIMITERS = 0.1  # share of the tokens
SIZE = 16  # tokens of a fixed segment, and the shortest span
TOKEN = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")
Span = tuple[int, int]


@click.command()
@click.option("--tokens", default=1_000_000, show_default=True, help="Length of the token arrays.")
@click.option(
    "--characters", default=1_000_000, show_default=True, help="Length of the text for Punkt."
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Prose in UTF-8, repeated when it is too short.  [default: Python's language reference]",
)
@click.option("--rounds", default=5, show_default=True, help="Median over so many rounds.")
@json_option
def segment(
    tokens: int, characters: int, text: Path | None, rounds: int, json_file: Path | None
) -> None:
    """Speed and memory of the segmentations; Punkt beside NLTK called directly.

    Every tenth token is a delimiter, by chance. Temporary bytes are the most that is held at once
    beyond input and output. NLTK gives the sentences of the text; `sentences` also finds the
    tokens of each.
    """
    prose = (
        read_text(text, "text")
        if text
        else "\n\n".join(topics(held_out=True) + topics(held_out=False))
    )
    prose = "".join(islice(cycle(prose), characters))
    rows = [*_arrays(tokens, rounds), *_punkt(prose, rounds)]
    publish(rows, json_file)


def _arrays(tokens: int, rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, tokens)
    table = rng.random(VOCABULARY) < DELIMITERS
    h = rng.exponential(2.0, tokens)
    marks = table[ids].tolist()
    cases: list[tuple[str, Callable[[], NDArray[Any] | tuple[NDArray[Any], ...]], list[int]]] = [
        ("by_delimiters", lambda: by_delimiters(ids, table), _starts_alone(marks)),
        ("by_punctuation", lambda: by_punctuation(ids, table), _starts_after(marks)),
        ("fixed", lambda: fixed(tokens, SIZE), [*range(0, tokens, SIZE)]),
        ("by_surprisal", lambda: by_surprisal(h, 1.0, SIZE), _starts_of_spans(h)),
    ]
    rows = []
    for name, call, starts in cases:
        case = f"{name}, {tokens} tokens"
        result = call()
        results = result if isinstance(result, tuple) else (result,)
        _equal(case, results[0], [*starts, tokens])
        took = milliseconds({"": call}, rounds=rounds)[""]
        held = peak_numpy_bytes(call) - sum(part.nbytes for part in results)
        rows.append(
            {
                "case": case,
                "tokens/s": tokens / took * 1e3,
                "wanted tokens/s": ">= 5,000,000",
                "temporary bytes/token": held / tokens,
                "wanted bytes": "<= 2",
            }
        )
    return rows


def _punkt(text: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Untrained, with the tokens' spans as tokenizers give them and as an array, and trained."""
    pairs = [match.span() for match in TOKEN.finditer(text)]
    array = np.array(pairs)
    for kind, spans, train in (
        ("Punkt untrained, a list of spans", pairs, False),
        ("Punkt untrained, an array of spans", array, False),
        ("Punkt trained on the text, a list of spans", pairs, True),
    ):
        sides: dict[str, Callable[[], Any]] = {
            "ours": partial(sentences, text, spans, train_on_text=train),
            "nltk": partial(_nltk, text, train),
        }
        case = f"sentences, {kind}, {len(text)} characters"
        _equal(case, sides["ours"](), _offsets_of_sentences(sides["nltk"](), pairs))
        took = milliseconds(sides, rounds=rounds, warm_up=0)
        yield {
            "case": case,
            "kv-segment ms": took["ours"],
            "NLTK ms": took["nltk"],
            "ratio": took["nltk"] / took["ours"],
            "wanted": ">= 0.9",
        }


def _nltk(text: str, train: bool) -> list[Span]:
    return list(PunktSentenceTokenizer(text if train else None).span_tokenize(text))


def _starts_alone(marks: Sequence[bool]) -> list[int]:
    """A token that is a delimiter starts a segment, and so does the one after it."""
    return [t for t, mark in enumerate(marks) if t == 0 or mark or marks[t - 1]]


def _starts_after(marks: Sequence[bool]) -> list[int]:
    """A token that is no delimiter starts a segment after one that is."""
    return [t for t, mark in enumerate(marks) if t == 0 or (marks[t - 1] and not mark)]


def _starts_of_spans(h: NDArray[np.float64]) -> list[int]:
    """Anchors by numpy's own mean and deviation; then gap by gap, the short ones filled."""
    anchors = h > h.mean() + h.std()
    exact = anchors.tolist()
    ends = [*np.flatnonzero(anchors).tolist(), len(h)]
    start = 0
    for end in ends:
        if end - start < SIZE:
            exact[start:end] = [True] * (end - start)
        start = end + 1
    return [t for t in range(len(exact)) if t == 0 or exact[t] != exact[t - 1]]


def _offsets_of_sentences(found: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Token by token: in which of the sentences its last character lies."""
    starts = [start for start, _ in found[1:]]
    place = [bisect_right(starts, end - 1) for _, end in spans]
    changes = [t for t in range(1, len(place)) if place[t] != place[t - 1]]
    return [0, *changes, len(place)]


def _equal(case: str, ours: NDArray[np.int64], wanted: Sequence[int]) -> None:
    equal(case, torch.from_numpy(ours), torch.tensor(wanted))
