"""`kv-bench methods-step`: one layer's prompt and decoding step by the methods' own functions.

One layer of Llama-3.1-8B, or of another shape, with random queries and values, and random keys
whose rank before RoPE is what factors can hold. Surprisal, for methods that want it, is drawn from
an exponential distribution, about as skewed as that of text. A prompt is compressed
by `Method.compress`, decoding steps are those of the state that it leaves, each with a new random
query, so that steps have little in common and nearly everything that is retrieved has to move,
unless `--alike` makes them like each other. Full KV is SDPA over the whole prompt in its faster
layout for grouped heads, as in `kv-bench decode-step`, whose cases are what `--primitive` sets
beside the methods' steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoTokenizer

from kv_bench import llama_layer
from kv_bench.decode_step import DTYPES, SHORTEST, WITHIN, Layer, checked_case, full_kv, nbytes
from kv_bench.llama_layer import LLAMA_8B, SHAPES, Shape
from kv_bench.measure import (
    agree,
    free_one_block,
    json_option,
    milliseconds,
    publish,
    set_threads,
    threads_option,
)
from kv_bench.variants import method_named, parse_lengths
from kv_integration import METHODS, LayerState, Method, Plan, haystack
from kv_integration.cli.inputs import parse_budget, parse_names
from kv_integration.embedded import model_path
from kv_integration.method import Context, Row
from kv_integration.rope import RopeTables, Rotation, Turn
from kv_integration.router import Router
from kv_lowrank import rotate

MIB, GIB = 2**20, 2**30
RANK = 160  # of the keys before RoPE, all heads together: what ShadowKV holds by default
SHORT = 192  # tokens on which lossless settings are compared with full KV
NAMES = "sentencekv,shadowkv,shadowkvplus"
# Case of `kv-bench decode-step` that does a method's step by primitives alone, and its budget.
PRIMITIVES: dict[str, tuple[str, int | float]] = {
    "sentencekv": ("sentence", 1024),
    "shadowkv": ("shadow", 2464),
    "sekv": ("sekv_10", 0.1),
}


class Prompt:
    """A prompt of one layer as a method meets it, and tokens that come after it."""

    def __init__(self, tokens: int, dtype: torch.dtype, seed: int, shape: Shape = LLAMA_8B) -> None:
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.head_size
        self.scale = self.size**-0.5
        self.draw = torch.Generator().manual_seed(seed)
        self.dtype, self.tokens = dtype, tokens
        self.tokenizer = AutoTokenizer.from_pretrained(model_path())
        text = " ".join(haystack.topics(held_out=False))
        ids = torch.tensor(self.tokenizer(text)["input_ids"])
        self.ids = ids.repeat(-(-tokens // len(ids)))[:tokens]
        place = torch.arange(tokens + 1024)[None]
        self.cos, self.sin = shape.rotary(shape.config())(self.randn(1), place)
        basis = self.randn(RANK, self.kv_heads * self.size, dtype=torch.float32) / RANK**0.5
        self.basis = basis.to(dtype)
        self.keys = self.states(0, tokens)
        self.values = self.randn(1, self.kv_heads, tokens, self.size)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.draw, dtype=dtype or self.dtype)

    def states(self, start: int, count: int) -> Tensor:
        """Keys [1, H_kv, n, D] of tokens from `start` on, after RoPE."""
        joint = self.randn(count, RANK) @ self.basis
        plain = joint.view(1, count, self.kv_heads, self.size).transpose(1, 2)
        at = slice(start, start + count)
        return rotate(plain, self.cos[:, at], self.sin[:, at])

    def queries(self, count: int) -> Tensor:
        return self.randn(1, self.heads, count, self.size)

    def plan(self, method: Method) -> Plan:
        plan = method.begin([self.ids], Context(self.tokenizer))
        plan.settle(recompress=False)
        if method.needs_surprisal:  # as skewed as that of text; in nats
            plan.finish([torch.empty(self.tokens).exponential_(0.4, generator=self.draw)])
        return plan

    def row(self, method: Method) -> Row:
        rope = None
        if method.rope:
            turn = Turn(weakref.ref(self.cos), self.cos, self.sin, Rotation("half", "half"))
            rope = RopeTables(turn, self.keys.device, grows=method.rope == "all")
            cos, sin = (x[:, : self.tokens].clone() for x in (self.cos, self.sin))
            rope.append(cos, sin, None, batch=1)
        latest = self.queries(max(method.observe, 1))
        return Row(0, latest, self.keys, self.values, self.scale, rope=rope)


class Decoding:
    """A state, and new tokens for it one by one.

    alike: cosine, on average, of each query with the one before.
    """

    def __init__(
        self, prompt: Prompt, row: Row, plan: Plan, state: LayerState, alike: float = 0.0
    ) -> None:
        self.prompt, self.row, self.plan, self.state = prompt, row, plan, state
        self.seen, self.alike = prompt.tokens, alike
        self.query = prompt.queries(1)
        self.come()

    def come(self) -> None:
        """One more token: not part of what is timed."""
        prompt, fresh = self.prompt, (1 - self.alike**2) ** 0.5
        self.query = self.alike * self.query + fresh * prompt.queries(1)
        self.key = prompt.states(self.seen, 1)
        self.value = prompt.randn(1, prompt.kv_heads, 1, prompt.size)
        self.plan.advance(prompt.ids[None, self.seen % prompt.tokens, None], None)
        at = slice(self.seen, self.seen + 1)
        if self.row.rope is not None and self.row.rope.grows:
            self.row.rope.append(prompt.cos[:, at], prompt.sin[:, at], None, batch=1)
        self.seen += 1

    def step(self) -> Tensor:
        return self.state.step(
            self.query, self.key, self.value, valid=None, scale=self.prompt.scale
        )

    @property
    def shared_bytes(self) -> int:
        """What all layers of a model hold together: the plan, and RoPE's tables."""
        return self.plan.nbytes + (0 if self.row.rope is None else self.row.rope.nbytes)


def decoding(prompt: Prompt, method: Method) -> Decoding:
    row, plan = prompt.row(method), prompt.plan(method)
    return Decoding(prompt, row, plan, method.compress([row], plan))


def check(name: str, dtype: torch.dtype, seed: int, shape: Shape = LLAMA_8B) -> None:
    """With a budget beyond a short prompt the method's steps are full attention."""
    prompt = Prompt(SHORT, dtype, seed, shape)
    method = chosen(name, SHORT + 16)
    state = decoding(prompt, method)
    keys, values = [prompt.keys], [prompt.values]
    for _ in range(3):
        keys.append(state.key)
        values.append(state.value)
        grouped = state.query.double().view(prompt.kv_heads, -1, prompt.size)
        scores = grouped @ torch.cat(keys, 2)[0].double().mT * prompt.scale
        wanted = (scores.softmax(-1) @ torch.cat(values, 2)[0].double()).view_as(state.query)
        agree(f"{name}, nothing left out", state.step(), wanted, within=4 * WITHIN[dtype])
        state.come()


def measure(
    name: str,
    method: Method,
    prompt: Prompt,
    shape: Shape,
    *,
    rounds: int,
    prefill: bool,
    primitive: bool = False,
    alike: float = 0.0,
) -> dict[str, Any]:
    """One row: bytes, a step beside full KV and, if wanted, the step by primitives alone, and the
    time that compressing the prompt takes."""
    row, plan = prompt.row(method), prompt.plan(method)
    made: list[LayerState] = []  # a long prompt is compressed once, not once more to keep the state

    def call() -> None:
        made.clear()
        made.append(method.compress([row], plan))

    compress = milliseconds({"": call}, rounds=3 if prefill else 1, warm_up=int(prefill))[""]
    run = Decoding(prompt, row, plan, made[0], alike)
    layer = Layer(prompt.queries(1), prompt.keys, prompt.values)
    full = full_kv(layer, rounds)
    # Full KV comes before each, so that nothing that a step reads is in the processor's cache.
    sides = {"step": run.step}
    if primitive:
        sides["primitive"] = checked_case(PRIMITIVES[name][0], layer)[0].step
    taken: dict[str, list[float]] = {side: [] for side in ("full", *sides)}
    for turn in range(rounds + 2):
        for side, way in sides.items():
            each = milliseconds({"full": full, side: way}, rounds=1, warm_up=0)
            if turn > 1:
                taken["full"].append(each["full"])
                taken[side].append(each[side])
        run.come()
    typical = {side: median(times) for side, times in taken.items()}
    step, beside = typical["step"], typical["full"]
    alone = typical.get("primitive")
    tiers, traffic = run.state.nbytes(), run.state.traffic()
    whole = nbytes(prompt.keys, prompt.values)
    asked = traffic["hits"] + traffic["misses"]
    return {
        "case": name,
        "context": prompt.tokens,
        "attended": int(run.state.entries().max()),
        "step_ms": step,
        "full_kv_ms": beside,
        "ratio": beside / step,
        **({} if alone is None else {"primitive_ms": alone, "over_primitive": step / alone}),
        "hit_rate": traffic["hits"] / asked if asked else None,
        "moved_mib_per_step": traffic["bytes_moved"] / MIB / (rounds + 2),
        "device_mib": tiers["device"] / MIB,
        "shared_mib": run.shared_bytes / MIB,
        "host_mib": (tiers["host"] + tiers["disk"]) / MIB,
        "full_kv_mib": whole / MIB,
        "times_below": whole / (tiers["device"] + run.shared_bytes / shape.layers),
        "compress_ms": compress,
    }


def of_model(row: dict[str, Any], shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of the whole model: all layers' caches and what they share, then with the weights."""
    cache = (row["device_mib"] * shape.layers + row["shared_mib"]) * MIB
    full = row["full_kv_mib"] * shape.layers * MIB
    weights = shape.parameters() * dtype.itemsize
    return {
        "cache_gib": cache / GIB,
        "full_cache_gib": full / GIB,
        "share": cache / full,
        "total_gib": (weights + cache) / GIB,
        "full_total_gib": (weights + full) / GIB,
        "total_below": 1 - (weights + cache) / (weights + full),
    }


def latency(row: dict[str, Any], shape: Shape, output: int, *, rest_ms: float) -> dict[str, float]:
    """Seconds for the prompt and `output` tokens through all layers, and tokens per second.

    rest_ms: one token through a layer without its cache. Tokens are those of input and output.
    """
    tokens = row["context"] + output
    prompt, step = row["layer_prefill_ms"], rest_ms + row["step_ms"]
    ours = shape.layers * (prompt + row["compress_ms"] + output * step) / 1e3
    full = shape.layers * (prompt + output * (rest_ms + row["full_kv_ms"])) / 1e3
    return {
        "latency_s": ours,
        "full_latency_s": full,
        "tokens_per_s": tokens / ours,
        "full_tokens_per_s": tokens / full,
    }


@click.command("methods-step")
@click.option("--methods", default=NAMES, show_default=True, help="Methods with commas between.")
@click.option("--contexts", default="131072", show_default=True, help="Tokens, commas between.")
@click.option("--budget", help="Entries or share of the prompt.  [default: each method's own]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--prefill", is_flag=True, help="Also time the whole layer over the prompt.")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-8b", show_default=True)
@click.option("--model-bytes", is_flag=True, help="Also the bytes of all layers, and of weights.")
@click.option(
    "--output",
    type=click.IntRange(min=1),
    help="With --prefill: also the latency of so many tokens after the prompt, all layers.",
)
@click.option(
    "--router",
    is_flag=True,
    help="SeKV with a router, of random weights: routing keys for each query head, not KV head.",
)
@click.option(
    "--primitive",
    is_flag=True,
    help=f"Also decode-step's case of the same step, with its budget: {', '.join(PRIMITIVES)}.",
)
@click.option(
    "--alike",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Cosine of a step's query with the one before.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@threads_option
@json_option
def methods_step(
    methods: str,
    contexts: str,
    budget: str | None,
    dtype: str,
    rounds: int,
    prefill: bool,
    shape: str,
    model_bytes: bool,
    output: int | None,
    router: bool,
    primitive: bool,
    alike: float,
    seed: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """One layer's bytes, decoding step and prompt by each method's own functions.

    `device_mib` is what one layer holds on the device, `shared_mib` what all layers hold together;
    `times_below` is full KV over the first and a layer's part of the second. `added` is the time
    that compressing took over that of the whole layer's prefill. A method gets figures only after
    its steps were found equal to full attention where nothing is left out.
    """
    names = parse_names([methods], known=METHODS)
    lengths = parse_lengths(contexts)
    granted = None if budget is None else parse_budget(budget)
    if output is not None and not prefill:
        raise click.UsageError("--output needs --prefill")
    if primitive:
        check_primitive(names, lengths, budget, shape)
    set_threads(threads)
    free_one_block()
    form, kind = SHAPES[shape], DTYPES[dtype]
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in names:
            check(name, kind, seed, form)
        rest = llama_layer.prefill_ms(1, dtype=kind, rounds=rounds, shape=form) if output else 0.0
        for length in lengths:
            prompt = Prompt(length, kind, seed, form)
            whole = llama_layer.prefill_ms(length, dtype=kind, shape=form) if prefill else 0.0
            for name in names:
                budgeted = PRIMITIVES[name][1] if primitive else granted
                method = chosen(name, budgeted, form if router else None)
                row = measure(
                    name, method, prompt, form,
                    rounds=rounds, prefill=prefill, primitive=primitive, alike=alike,
                )  # fmt: skip
                if prefill:
                    row |= {"layer_prefill_ms": whole, "added": row["compress_ms"] / whole}
                if model_bytes:
                    row |= of_model(row, form, kind)
                if output is not None:
                    row |= latency(row, form, output, rest_ms=rest)
                rows.append(row)
    publish(rows, json_file)


def check_primitive(
    names: Sequence[str], lengths: Sequence[int], budget: str | None, shape: str
) -> None:
    """Raise UsageError unless there are primitives' cases for all that is asked for."""
    without = [name for name in names if name not in PRIMITIVES]
    if without:
        raise click.UsageError(f"--primitive knows {', '.join(PRIMITIVES)}, got {without[0]}")
    if budget is not None:
        raise click.UsageError("--primitive takes the budgets of its cases: leave --budget out")
    if shape != "llama-8b":
        raise click.UsageError(f"--primitive is of shape llama-8b, got {shape}")
    if min(lengths) < SHORTEST:
        raise click.UsageError(f"--primitive wants {SHORTEST} tokens at least, got {min(lengths)}")


def chosen(name: str, budget: int | float | None, routed: Shape | None = None) -> Method:
    """The method with this budget, or with its own; with a router of shape `routed` if it can."""
    method = method_named(name, budget)
    if routed is not None and "router" in {field.name for field in fields(method)}:  # type: ignore[arg-type]
        router = Router(1, routed.heads, routed.kv_heads, routed.head_size)
        return replace(method, router=router)  # type: ignore[type-var]
    return method
