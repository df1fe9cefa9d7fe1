"""`kv-bench score`: what the scores of kv-score hold at their peak, and how long they take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from kv_bench import llama_layer
from kv_bench.measure import (
    agree,
    json_option,
    milliseconds,
    peak_bytes,
    publish,
    set_threads,
    threads_option,
)
from kv_score import accumulated_attention, surprisal, window_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIB = 2**20
BLOCK = 128  # queries whose rows of the attention matrix the plain way holds together
CHUNK = 1024  # positions whose logits are looked at together
SAMPLE = 256  # positions whose surprisal is compared


@click.command()
@click.option("--keys", default=131072, show_default=True, help="Keys under the window.")
@click.option("--window", default=32, show_default=True, help="Queries of the window.")
@click.option("--accumulated", default=8192, show_default=True, help="Queries and keys of H2O's.")
@click.option("--heads", default=llama_layer.HEADS, show_default=True, help="Query heads.")
@click.option("--kv-heads", default=llama_layer.KV_HEADS, show_default=True, help="KV heads.")
@click.option("--size", default=llama_layer.HEAD_SIZE, show_default=True, help="Width of a head.")
@click.option("--positions", default=131072, show_default=True, help="Tokens with a surprisal.")
@click.option("--vocabulary", default=128256, show_default=True, help="Words of the LM head.")
@click.option("--hidden", default=64, show_default=True, help="Width of the hidden states.")
@click.option("--rounds", default=3, show_default=True, help="Median over so many rounds.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@threads_option
@json_option
def score(
    keys: int,
    window: int,
    accumulated: int,
    heads: int,
    kv_heads: int,
    size: int,
    positions: int,
    vocabulary: int,
    hidden: int,
    rounds: int,
    device: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Peak memory of attention scores and surprisal, and their time beside a plain softmax.

    "held MiB" is the allocator's peak: input and output counted for the window, neither for the
    others. Logits are as many and as large whatever the width of the hidden states, so these are
    narrow here to save time; a chunk of logits is 1024 positions by all words.
    """
    set_threads(threads)
    rows = []
    for name, dtype in DTYPES.items():
        q = torch.randn(1, heads, window, size, device=device).to(dtype)
        k = torch.randn(1, kv_heads, keys, size, device=device).to(dtype)
        rows.append(_window(f"window_attention, {window} over {keys}, {name}", q, k, rounds))
    q = torch.randn(1, heads, accumulated, size, device=device)
    k = torch.randn(1, kv_heads, accumulated, size, device=device)
    rows.append(_accumulated(f"accumulated_attention, {accumulated}, float32", q, k, rounds))
    for name, dtype in DTYPES.items():
        states = torch.randn(1, positions, hidden, device=device).to(dtype)
        words = torch.randn(vocabulary, hidden, device=device).div_(math.sqrt(hidden)).to(dtype)
        ids = torch.randint(vocabulary, (1, positions), device=device)
        case = f"surprisal, {positions} x {vocabulary} words, {name}"
        rows.append(_surprisal(case, states, words, ids))
    publish(rows, json_file)


def _window(case: str, q: Tensor, k: Tensor, rounds: int) -> dict[str, Any]:
    def ours() -> Tensor:
        return window_attention(q, k)

    def plain() -> Tensor:
        return _softmax(q, k.float()).sum(2)[..., : k.shape[2] - q.shape[2]]

    result = ours()
    agree(case, result, plain(), within=1e-5)
    took = milliseconds({"ours": ours, "plain": plain}, rounds=rounds)
    beside = q.nbytes + k.nbytes + result.nbytes
    held = q.nbytes + k.nbytes + peak_bytes(ours, q.device.type)
    return _row(case, held, "input + output", beside, "< 1.25") | _times(took)


def _accumulated(case: str, q: Tensor, k: Tensor, rounds: int) -> dict[str, Any]:
    heads, count = q.shape[1:3]

    def ours() -> Tensor:
        return accumulated_attention(q, k)

    def plain() -> Tensor:
        scores = q.new_zeros(1, heads, count)
        for start in range(0, count, BLOCK):
            end = min(start + BLOCK, count)
            scores[..., :end] += _softmax(q[:, :, start:end], k[:, :, :end]).sum(2)
        return scores

    result = ours()
    agree(case, result, plain(), within=1e-5)
    took = milliseconds({"ours": ours, "plain": plain}, rounds=rounds, warm_up=0)
    held = peak_bytes(ours, q.device.type) - result.nbytes
    return _row(case, held, "the whole matrix", 4 * heads * count**2, "< 1") | _times(took)


def _surprisal(case: str, states: Tensor, words: Tensor, ids: Tensor) -> dict[str, Any]:
    results = []

    def ours() -> None:
        results.append(surprisal(states, words, ids, chunk=CHUNK))

    took = milliseconds({"": ours}, rounds=1, warm_up=0)[""]
    held = peak_bytes(ours, states.device.type) - results[-1].nbytes
    step = max(1, (ids.shape[1] - 1) // SAMPLE)
    logits = states[0, :-1:step].double() @ words.double().mT
    wanted = torch.nn.functional.cross_entropy(logits, ids[0, 1::step], reduction="none")
    for result in results:
        agree(case, result[0, 1::step], wanted, within=1e-5 if words.itemsize == 4 else 1e-2)
    beside = CHUNK * len(words) * states.itemsize
    return _row(case, held, "one chunk of logits", beside, "< 1") | {"kv-score ms": took}


def _softmax(q: Tensor, k: Tensor) -> Tensor:
    """Causal attention [B, H_q, N, T] of the last N positions, in float32, every number of it."""
    batch, heads, count, size = q.shape
    kv_heads, tokens = k.shape[1:3]
    packed = (q.float() * size**-0.5).reshape(batch, kv_heads, -1, size)
    logits = (packed @ k.mT).view(batch, heads, count, tokens)
    last = logits[..., tokens - count :]  # all that a query may not see lies here
    last.masked_fill_(torch.ones_like(last[0, 0], dtype=torch.bool).triu(1), -math.inf)
    return logits.softmax(-1)


def _row(case: str, held: int, beside: str, theirs: int, wanted: str) -> dict[str, Any]:
    return {
        "case": case,
        "held MiB": held / MIB,
        "beside": beside,
        "MiB": theirs / MIB,
        "ratio": held / theirs,
        "wanted": wanted,
    }


def _times(took: dict[str, float]) -> dict[str, Any]:
    return {
        "kv-score ms": took["ours"],
        "plain softmax ms": took["plain"],
        "times as fast": took["plain"] / took["ours"],
    }
