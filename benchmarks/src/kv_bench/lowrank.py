"""`kv-bench lowrank`: factors of keys and values beside LAPACK's own and beside a whole layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kv_bench import llama_layer
from kv_bench.measure import (
    agree,
    json_option,
    milliseconds,
    publish,
    set_threads,
    threads_option,
)
from kv_lowrank import (
    LowRank,
    rotate,
    rows,
    span_rows,
    span_svd,
    split_heads,
    truncated_svd,
    unrotate,
)
from kv_segment import by_surprisal

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@click.command()
@click.option("--tokens", default=16384, show_default=True, help="Rows of the joint matrix.")
@click.option("--span-tokens", default=32768, show_default=True, help="Tokens in spans.")
@click.option("--heads", default=llama_layer.KV_HEADS, show_default=True, help="KV heads.")
@click.option("--size", default=llama_layer.HEAD_SIZE, show_default=True, help="Width of a head.")
@click.option("--rank", default=160, show_default=True, help="Rank of the joint matrix.")
@click.option("--max-rank", default=32, show_default=True, help="Largest rank of a span.")
@click.option("--rounds", default=3, show_default=True, help="Median over so many rounds.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@threads_option
@json_option
def lowrank(
    tokens: int,
    span_tokens: int,
    heads: int,
    size: int,
    rank: int,
    max_rank: int,
    rounds: int,
    device: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Low-rank factors: one joint SVD, all of ShadowKV's, and an SVD of every span.

    The joint matrix has the pre-RoPE keys of all heads side by side. The spans lie between
    surprising tokens and have at least 16 tokens, as in SeKV; each KV head has its own SVD of each.
    """
    set_threads(threads)
    table: list[dict[str, Any]] = []
    joint = _joint(tokens, heads * size, rank).to(device)
    table.extend(_truncated(joint, rank, rounds))
    for name, dtype in DTYPES.items():
        table.append(_shadowkv(name, dtype, tokens, heads, size, rank, rounds, device))
    offsets = natural_offsets(span_tokens)
    for kind, spread in (("keys", 1.0), ("values", 0.3)):
        x = _states(span_tokens, heads, size, spread).to(device)
        table.extend(_spans(kind, x, offsets, max_rank, rounds))
    publish(table, json_file)


def natural_offsets(tokens: int, seed: int = 0) -> Tensor:
    """Offsets of spans of at least 16 tokens, cut by simulated surprisal, `tokens` in all.

    Surprisal is exponential around a level that drifts over some fifty tokens; the anchors and the
    shorter spans between them, which SeKV keeps as they are, are left out.
    """
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        level = np.zeros(65536)
        for step, shock in enumerate(generator.normal(0.0, 0.06, len(level) - 1)):
            level[step + 1] = 0.98 * level[step] + shock
        offsets, anchors = by_surprisal(generator.exponential(np.exp(level)))
        lengths += np.diff(offsets)[~anchors[offsets[:-1]]].tolist()
    ends = np.minimum(np.cumsum(lengths), tokens)
    count = int(np.searchsorted(ends, tokens)) + 1
    return torch.tensor([0, *ends[:count].tolist()])


def _truncated(x: Tensor, rank: int, rounds: int) -> list[dict[str, Any]]:
    """`gram` beside torch's exact and randomized decompositions of the same matrix."""
    sides = {
        "ours": lambda: truncated_svd(x, rank, method="gram"),
        "torch.linalg.svd": lambda: torch.linalg.svd(x, full_matrices=False),
        "torch.svd_lowrank": lambda: torch.svd_lowrank(x, rank),
    }
    case = f"gram, {x.shape[0]} x {x.shape[1]} to rank {rank}"
    u, sigma, vh = sides["torch.linalg.svd"]()
    best = _loss(x, LowRank(u[:, :rank] * sigma[:rank], vh[:rank]))
    agree(case, _loss(x, sides["ours"]()), best, within=1e-4)
    took = milliseconds(sides, rounds=rounds, warm_up=0)
    return [
        _row(case, took["ours"], name, took[name], wanted)
        for name, wanted in (("torch.linalg.svd", ">= 4"), ("torch.svd_lowrank", "> 1"))
    ]


def _shadowkv(
    name: str,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    size: int,
    rank: int,
    rounds: int,
    device: str,
) -> dict[str, Any]:
    """From the keys that attention sees to factors per head, beside one layer's whole prefill."""
    plain = _joint(tokens, heads * size, rank, noise=0.0).unflatten(-1, (heads, size))
    plain = plain.transpose(0, 1)[None].to(device)
    rope = LlamaRotaryEmbedding(llama_layer.llama_8b()).to(device)
    cos, sin = rope(plain, torch.arange(tokens, device=device)[None])
    cos, sin = cos[..., :size], sin[..., :size]
    keys = rotate(plain, cos, sin).to(dtype)

    def call() -> LowRank:
        joint = unrotate(keys, cos, sin).transpose(1, 2).flatten(2)
        return split_heads(truncated_svd(joint, rank, method="gram"), heads)

    case = f"ShadowKV's factors of {tokens} tokens, {name}"
    place = torch.arange(0, tokens, max(1, tokens // 256), device=device)
    rebuilt = rotate(rows(call(), place.expand(1, heads, -1)), cos[:, place], sin[:, place])
    # Rank `rank` by construction: nothing but rounding is lost.
    agree(case, rebuilt, keys[:, :, place], within=1e-4 if dtype == torch.float32 else 2e-2)
    ours = [milliseconds({"": call}, rounds=rounds)[""]]
    layer = llama_layer.prefill_ms(tokens, dtype=dtype, device=device)
    ours.append(milliseconds({"": call}, rounds=rounds)[""])
    return _row(case, statistics.mean(ours), "a layer's prefill", layer, ">= 100 (1%)")


def _spans(
    kind: str, x: Tensor, offsets: Tensor, max_rank: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """All spans in one call, beside loops over them: a span's heads together, or one by one."""
    bounds = offsets.tolist()
    pieces = list(pairwise(bounds))
    heads = x.shape[1]
    place = offsets.to(x.device)

    def together() -> list[tuple[Tensor, Tensor, Tensor]]:
        return [_cut(x[0, :, start:stop], max_rank) for start, stop in pieces]

    def alone() -> list[list[tuple[Tensor, Tensor, Tensor]]]:
        return [
            [_cut(x[0, head, start:stop], max_rank) for start, stop in pieces]
            for head in range(heads)
        ]

    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: span_svd(x, place, max_rank),
        "a loop over spans": together,
        "a loop over spans and heads": alone,
    }
    case = f"span_svd of {kind}, {len(pieces)} spans, {heads} heads"
    spans = span_svd(x, place, max_rank)
    wanted = torch.zeros_like(x)
    for number, (u, sigma, vh) in enumerate(together()):
        start, stop = pieces[number]
        kept = sigma.shape[-1]
        agree(case, spans.sigma[0, :, number, :kept], sigma, within=1e-4)
        wanted[0, :, start:stop] = (u * sigma[:, None]) @ vh
    every = torch.arange(len(pieces), device=x.device).split(64)
    for part in every:
        found, where = span_rows(spans, part.expand(1, heads, -1))
        real = where[0, 0] >= 0
        agree(case, found[0, :, real], wanted[0, :, where[0, 0][real]], within=1e-3)
    took = milliseconds(sides, rounds=rounds, warm_up=0)
    for name in list(sides)[1:]:
        yield _row(case, took["ours"], name, took[name], ">= 20")


def _cut(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    return u[..., :rank], sigma[..., :rank], vh[..., :rank, :]


def _row(case: str, ours: float, other: str, theirs: float, wanted: str) -> dict[str, Any]:
    return {
        "case": case,
        "kv-lowrank ms": ours,
        "beside": other,
        "ms": theirs,
        "ratio": theirs / ours,
        "wanted": wanted,
    }


def _loss(x: Tensor, factors: LowRank) -> Tensor:
    """Squared error of the factors."""
    return (x.double() - factors.left.double() @ factors.right.double()).square().sum()


def _joint(tokens: int, width: int, rank: int, *, noise: float = 0.3) -> Tensor:
    """Rows of falling spectrum up to `rank`, and noise beyond."""
    generator = torch.Generator().manual_seed(0)
    rank = min(rank, tokens, width)
    falling = torch.logspace(0, -1, rank)
    x = torch.randn(tokens, rank, generator=generator) * falling
    x = x @ torch.randn(rank, width, generator=generator)
    if noise:
        x += noise * torch.randn(tokens, width, generator=generator)
    return x


def _states(tokens: int, heads: int, size: int, spread: float) -> Tensor:
    """[1, H, T, D]: channels of unequal size about a mean, each token like the one before it."""
    generator = torch.Generator().manual_seed(1)
    scale = (spread * torch.randn(heads, 1, size, generator=generator)).exp()
    mean = spread * torch.randn(heads, 1, size, generator=generator)
    x = torch.randn(heads, tokens, size, generator=generator)
    x = (x + 0.5 * torch.roll(x, 1, 1)) / math.sqrt(1.25)
    return ((x + 2 * mean) * scale)[None]
