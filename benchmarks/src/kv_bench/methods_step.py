"""`kv-bench methods-step`: one layer's prompt and decoding step by the methods' own functions.

One layer of Llama-3.1-8B with random queries and values, and random keys whose rank before RoPE is
what factors can hold. A prompt is compressed by `Method.compress`, decoding steps are those of the
state that it leaves, each with a new random query, so that steps have little in common and nearly
everything that is retrieved has to move. Full KV is SDPA over the whole prompt in its faster layout
for grouped heads, as in `kv-bench decode-step`.
"""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kv_bench import llama_layer
from kv_bench.decode_step import DTYPES, WITHIN, Layer, full_kv, nbytes
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
from kv_integration import METHODS, LayerState, Method, Plan, haystack
from kv_integration.cli.inputs import make_method, parse_budget, parse_names
from kv_integration.embedded import model_path
from kv_integration.method import Context, Row
from kv_integration.rope import RopeTables, Rotation, Turn
from kv_lowrank import rotate

MIB = 2**20
LAYERS = 32  # that share the plan and the RoPE tables
RANK = 160  # of the keys before RoPE, all heads together: what ShadowKV holds by default
SHORT = 192  # tokens on which lossless settings are compared with full KV
SCALE = HEAD_SIZE**-0.5
CASES = "sentencekv,shadowkv,shadowkvplus"


class Prompt:
    """A prompt of one layer as a method meets it, and tokens that come after it."""

    def __init__(self, tokens: int, dtype: torch.dtype, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.dtype, self.tokens = dtype, tokens
        self.tokenizer = AutoTokenizer.from_pretrained(model_path())
        text = " ".join(haystack.topics(held_out=False))
        ids = torch.tensor(self.tokenizer(text)["input_ids"])
        self.ids = ids.repeat(-(-tokens // len(ids)))[:tokens]
        place = torch.arange(tokens + 1024)[None]
        self.cos, self.sin = LlamaRotaryEmbedding(llama_layer.config())(self.randn(1), place)
        basis = self.randn(RANK, KV_HEADS * HEAD_SIZE, dtype=torch.float32) / RANK**0.5
        self.basis = basis.to(dtype)
        self.keys, self.values = self.states(0, tokens), self.randn(1, KV_HEADS, tokens, HEAD_SIZE)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.draw, dtype=dtype or self.dtype)

    def states(self, start: int, count: int) -> Tensor:
        """Keys [1, H_kv, n, D] of tokens from `start` on, after RoPE."""
        joint = self.randn(count, RANK) @ self.basis
        plain = joint.view(1, count, KV_HEADS, HEAD_SIZE).transpose(1, 2)
        at = slice(start, start + count)
        return rotate(plain, self.cos[:, at], self.sin[:, at])

    def queries(self, count: int) -> Tensor:
        return self.randn(1, HEADS, count, HEAD_SIZE)

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
        return Row(0, latest, self.keys, self.values, SCALE, rope=rope)


class Decoding:
    """A state, and new tokens for it one by one."""

    def __init__(self, prompt: Prompt, row: Row, plan: Plan, state: LayerState) -> None:
        self.prompt, self.row, self.plan, self.state = prompt, row, plan, state
        self.seen = prompt.tokens
        self.come()

    def come(self) -> None:
        """One more token: not part of what is timed."""
        prompt = self.prompt
        self.query, self.key = prompt.queries(1), prompt.states(self.seen, 1)
        self.value = prompt.randn(1, KV_HEADS, 1, HEAD_SIZE)
        self.plan.advance(prompt.ids[None, self.seen % prompt.tokens, None], None)
        at = slice(self.seen, self.seen + 1)
        if self.row.rope is not None and self.row.rope.grows:
            self.row.rope.append(prompt.cos[:, at], prompt.sin[:, at], None, batch=1)
        self.seen += 1

    def step(self) -> Tensor:
        return self.state.step(self.query, self.key, self.value, valid=None, scale=SCALE)

    @property
    def shared_bytes(self) -> int:
        """What all layers of a model hold together: the plan, and RoPE's tables."""
        return self.plan.nbytes + (0 if self.row.rope is None else self.row.rope.nbytes)


def decoding(prompt: Prompt, method: Method) -> Decoding:
    row, plan = prompt.row(method), prompt.plan(method)
    return Decoding(prompt, row, plan, method.compress([row], plan))


def check(name: str, dtype: torch.dtype, seed: int) -> None:
    """With a budget beyond a short prompt the method's steps are full attention."""
    prompt = Prompt(SHORT, dtype, seed)
    method = make_method(name, SHORT + 16, methods=METHODS)
    if method is None:
        raise click.UsageError(f"{name} is no method of ours")
    state = decoding(prompt, method)
    keys, values = [prompt.keys], [prompt.values]
    for _ in range(3):
        keys.append(state.key)
        values.append(state.value)
        grouped = state.query.double().view(KV_HEADS, -1, HEAD_SIZE)
        scores = grouped @ torch.cat(keys, 2)[0].double().mT * SCALE
        wanted = (scores.softmax(-1) @ torch.cat(values, 2)[0].double()).view_as(state.query)
        agree(f"{name}, nothing left out", state.step(), wanted, within=4 * WITHIN[dtype])
        state.come()


def measure(
    name: str, method: Method, prompt: Prompt, *, rounds: int, prefill: bool
) -> dict[str, Any]:
    """One row: bytes, a step beside full KV, and the time that compressing the prompt takes."""
    row, plan = prompt.row(method), prompt.plan(method)
    call = partial(method.compress, [row], plan)
    compress = milliseconds({"": call}, rounds=3 if prefill else 1, warm_up=int(prefill))[""]
    run = Decoding(prompt, row, plan, call())
    query = prompt.queries(1)
    full = full_kv(Layer(query, prompt.keys, prompt.values), rounds)
    taken: dict[str, list[float]] = {"step": [], "full": []}
    for turn in range(rounds + 2):
        each = milliseconds({"full": full, "step": run.step}, rounds=1, warm_up=0)
        if turn > 1:
            for side, ms in each.items():
                taken[side].append(ms)
        run.come()
    step, beside = (sorted(taken[side])[rounds // 2] for side in ("step", "full"))
    tiers, traffic = run.state.nbytes(), run.state.traffic()
    whole = nbytes(prompt.keys, prompt.values)
    asked = traffic["hits"] + traffic["misses"]
    found = {
        "case": name,
        "context": prompt.tokens,
        "attended": int(run.state.entries().max()),
        "step_ms": step,
        "full_kv_ms": beside,
        "ratio": beside / step,
        "hit_rate": traffic["hits"] / asked if asked else None,
        "moved_mib_per_step": traffic["bytes_moved"] / MIB / (rounds + 2),
        "device_mib": tiers["device"] / MIB,
        "shared_mib": run.shared_bytes / MIB,
        "host_mib": (tiers["host"] + tiers["disk"]) / MIB,
        "full_kv_mib": whole / MIB,
        "times_below": whole / (tiers["device"] + run.shared_bytes / LAYERS),
        "compress_ms": compress,
    }
    if prefill:
        layer = llama_layer.prefill_ms(prompt.tokens, dtype=prompt.dtype)
        found |= {"layer_prefill_ms": layer, "added": compress / layer}
    return found


@click.command("methods-step")
@click.option("--methods", default=CASES, show_default=True, help="Methods with commas between.")
@click.option("--contexts", default="131072", show_default=True, help="Tokens, commas between.")
@click.option("--budget", help="Entries or share of the prompt.  [default: each method's own]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--prefill", is_flag=True, help="Also time the whole layer over the prompt.")
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
    seed: int,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """One layer's bytes, decoding step and prompt by each method's own functions.

    `device_mib` is what one layer holds on the device, `shared_mib` what all layers hold together;
    `times_below` is full KV over the first and a 32nd of the second. `added` is the time that
    compressing took over that of the whole layer's prefill. A method gets figures only after its
    steps were found equal to full attention where nothing is left out.
    """
    names = parse_names([methods], known=METHODS)
    lengths = [int(n) for n in contexts.split(",")]
    granted = None if budget is None else parse_budget(budget)
    set_threads(threads)
    free_one_block()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in names:
            check(name, DTYPES[dtype], seed)
        for length in lengths:
            prompt = Prompt(length, DTYPES[dtype], seed)
            for name in names:
                method = chosen(name, granted)
                rows.append(measure(name, method, prompt, rounds=rounds, prefill=prefill))
    publish(rows, json_file)


def chosen(name: str, budget: int | float | None) -> Method:
    """The method with this budget, or with its own."""
    method = make_method(name, budget, methods=METHODS)
    if method is None:
        raise click.UsageError(f"{name} is no method of ours")
    return method
