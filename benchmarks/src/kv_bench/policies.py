"""`kv-bench policies`: clustering and adaptive blocks beside the papers' sequential algorithms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from kv_bench import sequential
from kv_bench.llama_layer import attention_ms
from kv_bench.measure import (
    equal,
    json_option,
    milliseconds,
    publish,
    set_threads,
    threads_option,
)
from kv_integration.embedded import model_path
from kv_integration.haystack import topics
from kv_policies import adaptive_blocks, greedy_clusters
from kv_segment import (
    DELIMITERS_CLAUSE,
    DELIMITERS_SEMANTICACHE,
    by_delimiters,
    by_punctuation,
    delimiter_table,
)

RATIO, SHARE = 50.0, 0.03
THETA = 0.7  # SemantiCache picks from [0.5, 0.9]
BUDGET, MAX_BLOCK, DELTA = 0.1, 16, 0.9
SENTENCE_MARKS = (".", "?", "!")  # a line's end is none: chunks of a few hundred tokens occur
POOL = 7  # tokens that a score is the largest of
Ints = NDArray[np.int64]


@click.command()
@click.option("--tokens", default=32768, show_default=True, help="Length of the prompt.")
@click.option("--kv-heads", default=8, show_default=True, help="KV heads.")
@click.option("--head-size", default=128, show_default=True, help="Numbers per key.")
@click.option("--rounds", default=5, show_default=True, help="Median over so many rounds.")
@threads_option
@json_option
def policies(
    tokens: int,
    kv_heads: int,
    head_size: int,
    rounds: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Clustering and adaptive blocks beside the papers' algorithms and one layer's attention.

    Segments are those of Python's language reference in tokens of the embedded model; keys and
    scores are drawn. Each ratio says how many times as long another way takes. `torch rows` and
    `numpy rows` go token by token as the papers write it, through the rows of a torch tensor or a
    numpy array, norms computed once; `float64 pairs`, of clustering alone, computes each cosine
    from the two keys in float64; `numpy segments` is the same algorithm with numpy operations for
    all tokens of a chunk at each seed, or of a segment at each block size. They run once. Values
    are not checked, which the others do not do either. `kept` is the share of the tokens that are
    left. `attention` is the causal attention of one Llama-3.1-8B layer over as many tokens, in
    float32.
    """
    set_threads(threads)
    rng = np.random.default_rng(0)
    cuts = segmentations(tokens)
    attention = attention_ms(tokens, dtype=torch.float32)
    rows = [
        *(
            _clusters(f"greedy_clusters, {name}", cuts[name], kv_heads, head_size, rounds, rng)
            for name in ("delimiter chunks", "sentences")
        ),
        *(
            _blocks(f"adaptive_blocks, {heads} head{'s' * (heads > 1)}", cuts, heads, rounds, rng)
            for heads in (1, kv_heads)
        ),
    ]
    for row in rows:
        row |= {
            "attention ms": attention,
            "share": row["ms"] / attention,
            "wanted share": f"<= {SHARE}",
        }
    publish(rows, json_file)


def segmentations(tokens: int) -> dict[str, Ints]:
    """Offsets of so many tokens of prose: SemantiCache's chunks, sentences, SABlock's clauses."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    text = "\n\n".join(topics(held_out=True) + topics(held_out=False))
    once = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = np.resize(np.asarray(once), tokens)
    cuts = {
        "delimiter chunks": (by_delimiters, DELIMITERS_SEMANTICACHE),
        "sentences": (by_punctuation, SENTENCE_MARKS),
        "clauses": (by_punctuation, DELIMITERS_CLAUSE),
    }
    return {
        name: cut(ids, delimiter_table(tokenizer, marks)) for name, (cut, marks) in cuts.items()
    }


def _clusters(
    case: str,
    offsets: Ints,
    kv_heads: int,
    head_size: int,
    rounds: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    keys = draw_keys(offsets, kv_heads, head_size, rng)
    theta = clear_of_cosines(keys, offsets, THETA)
    ours_keys, ours_offsets = torch.from_numpy(keys)[None], torch.from_numpy(offsets)

    def ours() -> Tensor:
        return greedy_clusters(ours_keys, ours_offsets, theta, check=False)[0]

    row = _timed(
        f"{case}, {_sizes(offsets)}",
        ours,
        {
            "float64 pairs": lambda: torch.from_numpy(
                sequential.cluster_by_pairs(keys, offsets, theta)
            ),
            "torch rows": lambda: torch.from_numpy(
                sequential.cluster(ours_keys[0], offsets, theta)
            ),
            "numpy rows": lambda: torch.from_numpy(sequential.cluster(keys, offsets, theta)),
            "numpy segments": lambda: torch.from_numpy(
                sequential.cluster_by_seed(keys, offsets, theta)
            ),
        },
        rounds,
    )
    seeds = ours()
    row["kept"] = float((seeds == torch.arange(seeds.shape[1])).double().mean())
    return row


def _blocks(
    case: str, cuts: dict[str, Ints], heads: int, rounds: int, rng: np.random.Generator
) -> dict[str, Any]:
    offsets = cuts["clauses"]
    drawn = torch.from_numpy(rng.lognormal(sigma=2.0, size=(1, heads, int(offsets[-1]))))
    scores = torch.nn.functional.max_pool1d(drawn.float(), POOL, stride=1, padding=POOL // 2)
    ours_offsets, wide = torch.from_numpy(offsets), scores[0].double()
    budget = int(BUDGET * scores.shape[2])

    def ours() -> Tensor:
        kept = adaptive_blocks(
            scores, ours_offsets, budget, max_block=MAX_BLOCK, delta=DELTA, check=False
        )
        return kept[0]

    def reference(
        blocks: Callable[..., list[list[int]]], rows: Tensor | NDArray[np.float64]
    ) -> Callable[[], Tensor]:
        return lambda: torch.tensor(blocks(rows, offsets, budget, max_block=MAX_BLOCK, delta=DELTA))

    row = _timed(
        f"{case}, {_sizes(offsets)}",
        ours,
        {
            "torch rows": reference(sequential.blocks, wide),
            "numpy rows": reference(sequential.blocks, wide.numpy()),
            "numpy segments": reference(sequential.blocks_by_segment, wide.numpy()),
        },
        rounds,
    )
    return row | {"kept": BUDGET}


def _timed(
    case: str,
    ours: Callable[[], Tensor],
    others: Mapping[str, Callable[[], Tensor]],
    rounds: int,
) -> dict[str, Any]:
    """A row of times, of results that are the same in every number."""
    results: dict[str, Tensor] = {}

    def keeping(name: str) -> Callable[[], None]:
        return lambda: results.update({name: others[name]()})

    slow = milliseconds({name: keeping(name) for name in others}, rounds=1, warm_up=0)
    result = ours()
    for other in results.values():
        equal(case, result, other)
    ms = milliseconds({"ours": ours}, rounds=rounds, least_ms=50)["ours"]
    row = {"case": case, "ms": ms, "wanted ratio": f">= {RATIO:g}"}
    return row | {f"ratio to {name}": taken / ms for name, taken in slow.items()}


def draw_keys(
    offsets: Ints, kv_heads: int, head_size: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Keys [H, T, D]: a direction that a head's keys share, one per chunk, one of their own.

    The last is of different weight for each token, so that cosines spread around `THETA`.
    """
    lengths = np.diff(offsets)
    tokens = int(offsets[-1])
    shared = 0.9 * rng.normal(size=(kv_heads, 1, head_size))
    topic = 0.7 * rng.normal(size=(kv_heads, len(lengths), head_size))
    weight = rng.lognormal(-0.6, 0.5, (kv_heads, tokens, 1))
    own = weight * rng.normal(size=(kv_heads, tokens, head_size))
    return (shared + topic.repeat(lengths, axis=1) + own).astype(np.float32)


def clear_of_cosines(keys: NDArray[np.float32], offsets: Ints, theta: float) -> float:
    """The middle of the widest gap between cosines near `theta`, so that rounding decides none."""
    near = []
    for start, end in itertools.pairwise(offsets.tolist()):
        rows = keys[:, start:end].astype(np.float64)
        rows /= np.linalg.norm(rows, axis=-1, keepdims=True)
        cosines = rows @ rows.swapaxes(1, 2)
        near.append(cosines[np.abs(cosines - theta) < 1e-3])
    ordered = np.sort(np.concatenate([*near, [theta - 1e-3, theta + 1e-3]]))
    widest = int(np.argmax(np.diff(ordered)))
    return float(ordered[widest : widest + 2].mean())


def _sizes(offsets: Ints) -> str:
    lengths = np.diff(offsets)
    return f"{len(lengths)} of {lengths.mean():.1f} tokens on average, {lengths.max()} at most"
