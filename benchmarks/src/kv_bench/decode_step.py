"""`kv-bench decode-step`: attention of one decoding step, as each method does it, against full KV.

One layer of Llama-3.1-8B with random keys and values; the cases stand in `decode_cases`.

Full KV is torch's SDPA over the whole prompt, in the faster of its two layouts for grouped heads.
Copy, full KV and the case take turns, so that what a case reads is not in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kv_bench.decode_cases import CASES
from kv_bench.decode_layer import Case, Layer, each_head, exact, nbytes
from kv_bench.llama_layer import HEAD_SIZE, HEADS, KV_HEADS
from kv_bench.measure import (
    agree,
    free_one_block,
    json_option,
    milliseconds,
    publish,
    set_threads,
    threads_option,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Largest distance from the float64 result, over its norm: what rounding entries and results costs.
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHORTEST = 10240  # tokens of which SeKV's anchors, window and means leave something of the 10%
COPIED = 1 << 28  # bytes, far beyond any processor's cache


def full_kv(layer: Layer, rounds: int) -> Callable[[], Tensor]:
    """SDPA over the whole cache in the faster layout, its result checked first.

    `packed`: the queries of a KV head's group are rows of one matrix, as if they were positions.
    """
    packed = layer.q.view(layer.batch, layer.k.shape[1], -1, layer.k.shape[3])

    def as_rows() -> Tensor:
        return scaled_dot_product_attention(packed, layer.k, layer.v).view_as(layer.q)

    def as_heads() -> Tensor:
        return scaled_dot_product_attention(layer.q, layer.k, layer.v, enable_gqa=True)

    wanted = each_head(layer, lambda b, h, q: exact(q, layer.k[b, h], layer.v[b, h]))
    ways = {"packed": as_rows, "enable_gqa": as_heads}
    for name, way in ways.items():
        agree(f"full KV, {name}", way(), wanted, within=WITHIN[layer.q.dtype])
    taken = milliseconds(ways, rounds=min(rounds, 3))
    return ways[min(taken, key=lambda name: taken[name])]


def checked_case(name: str, layer: Layer) -> tuple[Case, Tensor]:
    """The case and what it picks, after its result was found right."""
    case = CASES[name](layer)
    picks = case.pick()
    agree(name, case.attend(picks), case.wanted(picks), within=WITHIN[layer.q.dtype])
    return case, picks


def measure(
    name: str, layer: Layer, full: Callable[[], Tensor], rounds: int
) -> dict[str, str | int | float]:
    """One row, after the case's result was found right."""
    case, picks = checked_case(name, layer)
    read = case.read(picks)
    source = torch.ones(min(COPIED, nbytes(layer.k)), dtype=torch.uint8, device=layer.k.device)
    target = torch.empty_like(source)
    taken = milliseconds(
        {"copy": lambda: target.copy_(source), "full": full, "case": case.step}, rounds=rounds
    )
    speed = 2 * nbytes(source) / taken["copy"] / 1e6  # GB/s, read and written
    return {
        "case": name,
        "context": layer.tokens,
        "batch": layer.batch,
        "ms": taken["case"],
        "full_kv_ms": taken["full"],
        "ratio": taken["full"] / taken["case"],
        "bytes": read,
        "copy_gb_s": speed,
        "over_bound": taken["case"] / (read / speed / 1e6),
    }


class Listed(click.ParamType):
    """Words or whole numbers with commas between."""

    name = "list"

    def __init__(self, convert: Callable[[str], int | str]) -> None:
        self.each = convert

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int | str]:
        if isinstance(value, list):
            return value
        try:
            return [self.each(part.strip()) for part in str(value).split(",")]
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"{text!r} is no number of 1 or more")
    return int(text)


def _context(text: str) -> int:
    if _positive(text) < SHORTEST:
        raise ValueError(f"a context must be at least {SHORTEST} tokens, got {text}")
    return int(text)


def _case(text: str) -> str:
    if text not in CASES:
        raise ValueError(f"{text!r} is none of {', '.join(CASES)}")
    return text


@click.command("decode-step")
@click.option(
    "--contexts", type=Listed(_context), default="16384,32768,65536,131072", show_default=True
)
@click.option("--batches", type=Listed(_positive), default="1,4", show_default=True)
@click.option("--cases", type=Listed(_case), default=",".join(CASES), show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@threads_option
@json_option
def decode_step(
    contexts: Sequence[int],
    batches: Sequence[int],
    cases: Sequence[str],
    dtype: str,
    device: str,
    rounds: int,
    seed: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Attention of one decoding step, method by method, against full KV.

    Every result is compared with a float64 computation apart before anything is timed. `bytes` is
    what must be read; `copy_gb_s` the measured speed of a copy, read and written; `over_bound` the
    time over that of reading `bytes` at this speed.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch finds no CUDA device")
    set_threads(threads)
    free_one_block()
    found = []
    with torch.inference_mode():
        for context in contexts:
            for batch in batches:
                torch.manual_seed(seed)
                q, k, v = (
                    torch.randn(batch, heads, n, HEAD_SIZE, dtype=DTYPES[dtype], device=device)
                    for heads, n in ((HEADS, 1), (KV_HEADS, context), (KV_HEADS, context))
                )
                layer = Layer(q, k, v)
                del q, k, v
                full = full_kv(layer, rounds)
                found += [measure(name, layer, full, rounds) for name in cases]
                del layer, full
    publish(found, json_file)
