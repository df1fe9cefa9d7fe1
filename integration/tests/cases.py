"""Every method with settings that lose nothing and with settings that compress; conversations."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from families import ROPELESS, generate, prompt

from kv_integration import (
    D2O,
    H2O,
    METHODS,
    TOVA,
    CaM,
    ChunkKV,
    FullKV,
    InfiniGen,
    Loki,
    Method,
    PyramidKV,
    Quest,
    SABlock,
    SeKV,
    SemantiCache,
    SentenceKV,
    ShadowKV,
    ShadowKVPlus,
    SnapKV,
    StreamingLLM,
)

ROOMY = 200  # for methods that count generated tokens, too: more than any test generates
LOSSLESS: dict[str, Method] = {
    "full": FullKV(),
    "sentencekv": SentenceKV(budget=1.0),
    "semanticache": SemantiCache(theta=1.0),
    "sablock": SABlock(budget=1.0),
    "shadowkv": ShadowKV(budget=1.0),
    "shadowkvplus": ShadowKVPlus(budget=1.0, window=4, chunk=2, recent=5),
    "sekv": SeKV(budget=1.0),
    "streamingllm": StreamingLLM(budget=ROOMY),
    "h2o": H2O(budget=ROOMY),
    "tova": TOVA(budget=ROOMY),
    "snapkv": SnapKV(budget=1.0),
    "pyramidkv": PyramidKV(budget=1.0),
    "chunkkv": ChunkKV(budget=1.0),
    "cam": CaM(budget=1.0),
    "d2o": D2O(budget=1.0),
    "quest": Quest(budget=1.0),
    "loki": Loki(budget=1.0),
    "infinigen": InfiniGen(budget=1.0),
}
SMALL: dict[str, Method] = {
    "full": FullKV(),
    "sentencekv": SentenceKV(budget=12, window=4, hold="prompt"),
    "semanticache": SemantiCache(budget=16),
    "sablock": SABlock(budget=12, window=4),
    "shadowkv": ShadowKV(budget=12, window=4, chunk=2, outliers=1, rank=12),
    "shadowkvplus": ShadowKVPlus(budget=12, window=4, chunk=2, outliers=1, rank=8, recent=3),
    "sekv": SeKV(budget=24, window=4, sinks=1, min_length=3, max_length=6, max_rank=4),
    "streamingllm": StreamingLLM(budget=12, sinks=2),
    "h2o": H2O(budget=12),
    "tova": TOVA(budget=12),
    "snapkv": SnapKV(budget=12, window=4),
    "pyramidkv": PyramidKV(budget=12, window=4),
    "chunkkv": ChunkKV(budget=12, window=4, chunk=3),
    "cam": CaM(budget=12, spread=3),
    "d2o": D2O(budget=12),
    "quest": Quest(budget=12, page=5),
    "loki": Loki(budget=12),
    # Of a random model's queries no few directions stand out: rounding would choose among them.
    "infinigen": InfiniGen(budget=12, share=1.0),
}
FEW = ("full", "sablock", "semanticache", "shadowkv", "sekv")
RETRIEVES = ("quest", "infinigen")
# What is forgotten while tokens are generated cannot come back.
FORGETS_ON = ("streamingllm", "h2o", "tova")
# An input of several tokens, a draft's too, attends all that is held: not what one by one would.
BY_INPUT = ("sentencekv", "shadowkv", "shadowkvplus", "quest", "loki", "infinigen")
CANNOT_CROP = ("h2o",)
RECOMPRESSES = ("semanticache", "sablock", "snapkv", "pyramidkv", "chunkkv", "cam", "d2o")

assert list(LOSSLESS) == list(SMALL) == list(METHODS)


def each(
    methods: dict[str, Method], names: Iterable[str] | None = None, *, but: Iterable[str] = ()
):
    """A test for each of these methods, which it gets as `method`."""
    chosen = [name for name in names or methods if name not in but]
    return pytest.mark.parametrize("method", [methods[n] for n in chosen], ids=chosen)


def in_families(
    methods: dict[str, Method],
    names: Iterable[str] | None = None,
    *,
    families: Iterable[str],
):
    """A test for each of these methods in each family that can have it: `family` and `method`."""
    chosen = [(f, n) for f in families for n in names or methods]
    fit = [(f, n) for f, n in chosen if not (methods[n].rope and f in ROPELESS)]
    ids = [f"{f}-{n}" for f, n in fit]
    return pytest.mark.parametrize(("family", "method"), [(f, methods[n]) for f, n in fit], ids=ids)


def close(actual, expected) -> None:
    """Equal to float32's rounding, summed over a model's layers."""
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=2e-4)


def converse(model, cache, turns, *, new: int = 4):
    """Several turns, each a tuple of one length per row, padded on the left where unequal.

    Returns the logits [new, B, V] of each turn.
    """
    ids = torch.empty(len(turns[0]), 0, dtype=torch.long)
    mask, logits = ids.clone(), []
    for number, lengths in enumerate(turns):
        turn = words(number, lengths)
        ids = torch.cat([ids, turn["input_ids"]], 1)
        mask = torch.cat([mask, turn["attention_mask"]], 1)
        ids, turn_logits = generate(
            model, {"input_ids": ids, "attention_mask": mask}, cache, new=new
        )
        mask = torch.cat([mask, torch.ones(len(mask), new, dtype=torch.long)], 1)
        logits.append(turn_logits)
    return logits


def words(turn, lengths):
    """What each row says in a turn: the same whatever the other rows say."""
    rows = [prompt(n, seed=100 * turn + row) for row, n in lengths_of(lengths)]
    longest = max(row["input_ids"].shape[1] for row in rows)
    return {
        name: torch.cat(
            [
                torch.nn.functional.pad(
                    row[name], (longest - row[name].shape[1], 0), value=int(name == "input_ids")
                )
                for row in rows
            ]
        )
        for name in ("input_ids", "attention_mask")
    }


def lengths_of(lengths):
    """`(row, length)` pairs; a dict names the rows it means."""
    return lengths.items() if isinstance(lengths, dict) else enumerate(lengths)
