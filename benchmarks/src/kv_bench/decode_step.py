"""`kv-bench decode-step`: attention of one decoding step, as each method does it, against full KV.

One layer of Llama-3.1-8B with random keys and values. Each case works on what its method leaves of
a prompt, held as the method holds it:

- `tokens_1024`: 1,024 entries, one after the other, as methods that evict the others keep them;
- `selected_1024`: 1,024 entries by index out of the whole cache, as methods do that keep all;
- `merged_20`: 20% as many entries as tokens, each with the log of the tokens it stands for;
- `sentence`: SentenceKV with a budget of 1,024: means of the sentences that keep a token are
  scored, 992 of 1,984 stored tokens are fetched by sentence, the last 32 are always there;
- `shadow`: ShadowKV: a landmark for every 8 tokens is scored, keys of 256 chunks are rebuilt from
  rank 160 and rotated, their values fetched; 48 outlier chunks and the last 32 tokens are exact;
- `sekv_10`: SeKV attending 10% of the prompt: spans of 16 to 112 tokens between anchors are routed
  in 32 dimensions, the best ones attended through their rank-32 factors, the others as one mean
  each; anchors and the last 512 tokens are exact.

Full KV is torch's SDPA over the whole prompt, in the faster of its two layouts for grouped heads.
Copy, full KV and the case take turns, so that what a case reads is not in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kv_attn_triton import (
    attention,
    landmark_topk,
    lowrank_attention,
    merge_states,
    selected_attention,
    span_attention,
)
from kv_bench.llama_layer import HEAD_SIZE, HEADS, KV_HEADS
from kv_bench.measure import (
    agree,
    json_option,
    milliseconds,
    publish,
    set_threads,
    threads_option,
)
from kv_policies import top_segments
from kv_score import segment_scores

GROUP = HEADS // KV_HEADS
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Largest distance from the float64 result, over its norm: what rounding entries and results costs.
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SAME = 1e-5  # scores nearer than this to each other may be taken in either order
SHORTEST = 10240  # tokens of which SeKV's anchors, window and means leave something of the 10%
COPIED = 1 << 28  # bytes, far beyond any processor's cache


@dataclass(frozen=True)
class Case:
    """One step: `attend(pick())`. `wanted` computes the same apart, in float64, for what was
    picked, and refuses a wrong pick; `read` is the bytes that no way to do the step can spare."""

    pick: Callable[[], Tensor]
    attend: Callable[[Tensor], Tensor]
    wanted: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], int]

    def step(self) -> Tensor:
        return self.attend(self.pick())


@dataclass(frozen=True)
class Layer:
    """Queries [B, 32, 1, 128] of one token and keys, values [B, 8, N, 128] of the prompt."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def batch(self) -> int:
        return self.k.shape[0]

    @property
    def tokens(self) -> int:
        return self.k.shape[2]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.k.device, dtype=self.k.dtype)

    def host(self, x: Tensor) -> Tensor:
        """Where methods put what they fetch from: pinned host memory, or simply memory."""
        return x.cpu().pin_memory() if x.is_cuda else x

    def heads(self) -> Iterator[tuple[int, int, Tensor]]:
        """Batch row, KV head and its queries [G, D] in float64."""
        grouped = self.q.double().view(self.batch, KV_HEADS, GROUP, HEAD_SIZE)
        for b in range(self.batch):
            for h in range(KV_HEADS):
                yield b, h, grouped[b, h]


def exact(q: Tensor, k: Tensor, v: Tensor, log_size: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D) + log_size) v in float64, for one KV head."""
    scores = q @ k.double().T / math.sqrt(HEAD_SIZE)
    if log_size is not None:
        scores = scores + log_size.double()
    return scores.softmax(-1) @ v.double()


def each_head(layer: Layer, result: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """`result(b, h, q)` of every KV head as [B, H_q, 1, D]."""
    out = torch.stack([result(b, h, q) for b, h, q in layer.heads()])
    return out.view(layer.batch, HEADS, 1, HEAD_SIZE)


def nbytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def refuse_unless(right: bool, what: str) -> None:
    if not right:
        raise click.ClickException(f"{what} picked what its scores do not; no figure is given")


def random_picks(layer: Layer, count: int) -> Tensor:
    """int64[B, H, count] positions, ascending, per KV head."""
    noise = torch.rand(layer.k.shape[:3], device=layer.k.device)
    return noise.topk(count, dim=-1).indices.sort(-1).values


def rows(x: Tensor, picks: Tensor) -> Tensor:
    return x.gather(2, picks.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]))


def tokens_1024(layer: Layer) -> Case:
    picks = random_picks(layer, 1024)
    k, v = rows(layer.k, picks), rows(layer.v, picks)
    return Case(
        pick=lambda: picks,
        attend=lambda _: attention(layer.q, k, v)[0],
        wanted=lambda _: each_head(layer, lambda b, h, q: exact(q, k[b, h], v[b, h])),
        read=lambda _: nbytes(k, v),
    )


def selected_1024(layer: Layer) -> Case:
    picks = random_picks(layer, 1024)
    k, v = layer.k, layer.v
    return Case(
        pick=lambda: picks,
        attend=lambda picks: selected_attention(layer.q, k, v, picks)[0],
        wanted=lambda picks: each_head(
            layer, lambda b, h, q: exact(q, k[b, h, picks[b, h]], v[b, h, picks[b, h]])
        ),
        read=lambda picks: picks.numel() * 2 * HEAD_SIZE * k.element_size(),
    )


def merged_20(layer: Layer) -> Case:
    k, v = (x[:, :, : layer.tokens // 5].clone() for x in (layer.k, layer.v))
    log_size = torch.randint(1, 10, k.shape[:3], device=k.device).float().log()
    return Case(
        pick=lambda: log_size,
        attend=lambda _: attention(layer.q, k, v, log_size=log_size)[0],
        wanted=lambda _: each_head(
            layer, lambda b, h, q: exact(q, k[b, h], v[b, h], log_size[b, h])
        ),
        read=lambda _: nbytes(k, v, log_size),
    )


def sentence(layer: Layer) -> Case:
    budget, window = 1024, 32
    fetched = budget - window
    lengths = torch.randint(8, 41, (layer.tokens // 8,))
    ends = lengths.cumsum(0)
    kept = torch.randperm(layer.tokens - window)[: 2 * fetched].sort().values
    offsets = torch.unique(torch.searchsorted(kept, torch.cat([ends.new_zeros(1), ends])))
    counts = offsets.diff()
    device = layer.k.device
    k, v = (x[:, :, kept.to(device)] for x in (layer.k, layer.v))
    sums = torch.zeros(layer.batch, KV_HEADS, len(counts), HEAD_SIZE, device=device)
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
    means = sums.index_add_(2, owner, k.float()) / counts.to(device)[:, None]
    means = means.to(k.dtype)
    k, v = layer.host(k), layer.host(v)
    alpha = torch.rand(layer.batch, KV_HEADS, len(kept), device=device)
    offsets = offsets.to(device)
    recent = [x[:, :, -window:].clone() for x in (layer.k, layer.v)]

    def pick() -> Tensor:
        scores = segment_scores(layer.q[:, :, 0], means)
        return top_segments(scores, alpha, offsets, fetched, check=False)

    def attend(picks: Tensor) -> Tensor:
        parts = [attention(layer.q, *recent), selected_attention(layer.q, k, v, picks)]
        return merge_states(parts)[0]

    def wanted(picks: Tensor) -> Tensor:
        def head(b: int, h: int, q: Tensor) -> Tensor:
            scores = means[b, h].double() @ q.mean(0)
            taken = torch.zeros(len(kept), dtype=torch.bool, device=device)
            taken[picks[b, h]] = True
            share = torch.zeros_like(scores).index_add_(0, owner, taken.double())
            share /= counts.to(device)
            refuse_unless(int(taken.sum()) == fetched, "sentence")
            whole, none, cut = scores[share == 1], scores[share == 0], (share > 0) & (share < 1)
            refuse_unless(bool(whole.min() >= none.max() - SAME), "sentence")
            refuse_unless(int(cut.sum()) <= 1, "sentence")
            inside = cut[owner]
            if bool(inside.any()):
                a, t = alpha[b, h, inside], taken[inside]
                refuse_unless(bool(a[t].min() >= a[~t].max()), "sentence")
            taken = taken.to(k.device)
            keys, values = (
                torch.cat([far[b, h, taken].to(device), near[b, h]])
                for far, near in zip((k, v), recent, strict=True)
            )
            return exact(q, keys, values)

        return each_head(layer, head)

    def read(picks: Tensor) -> int:
        return nbytes(means, *recent) + picks.numel() * 2 * HEAD_SIZE * k.element_size()

    return Case(pick, attend, wanted, read)


def rotary(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [1, N, D] of plain RoPE at Llama-3's base, half-split."""
    frequency = 500000.0 ** (-torch.arange(0, HEAD_SIZE, 2, device=device) / HEAD_SIZE)
    angle = torch.arange(tokens, device=device)[:, None] * frequency
    angle = torch.cat([angle, angle], -1)[None]
    return angle.cos(), angle.sin()


def shadow(layer: Layer) -> Case:
    chunk, rank, outliers, window = 8, 160, 48, 32
    chunks = min(256, layer.tokens // chunk)
    landmarks = layer.randn(layer.batch, KV_HEADS, layer.tokens // chunk, HEAD_SIZE)
    left = layer.randn(layer.batch, layer.tokens, rank)
    right = layer.randn(layer.batch, KV_HEADS, rank, HEAD_SIZE) / math.sqrt(rank)
    cos, sin = rotary(layer.tokens, layer.k.device)
    static = outliers * chunk + window
    k, v = (x[:, :, -static:].clone() for x in (layer.k, layer.v))
    values = layer.host(layer.v)
    within = torch.arange(chunk, device=layer.k.device)

    def tokens_of(picks: Tensor) -> Tensor:
        return (picks.unsqueeze(-1) * chunk + within).flatten(2)

    def attend(picks: Tensor) -> Tensor:
        args = (layer.q, left, right, values, tokens_of(picks), cos, sin)
        return merge_states([attention(layer.q, k, v), lowrank_attention(*args)])[0]

    def wanted(picks: Tensor) -> Tensor:
        tokens = tokens_of(picks)

        def head(b: int, h: int, q: Tensor) -> Tensor:
            logits = q @ landmarks[b, h].double().T / math.sqrt(HEAD_SIZE)
            scores = logits.log_softmax(-1).amax(0)
            taken = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
            taken[picks[b, h]] = True
            refuse_unless(int(taken.sum()) == chunks, "shadow")
            if chunks < len(scores):
                refuse_unless(bool(scores[taken].min() >= scores[~taken].max() - SAME), "shadow")
            t = tokens[b, h]
            plain = left[b, t].double() @ right[b, h].double()
            low, high = plain.chunk(2, -1)
            turned = plain * cos[0, t].double()
            turned += torch.cat([-high, low], -1) * sin[0, t].double()
            fetched = values[b, h, t.to(values.device)].to(v.device)
            return exact(q, torch.cat([turned, k[b, h].double()]), torch.cat([fetched, v[b, h]]))

        return each_head(layer, head)

    def read(picks: Tensor) -> int:
        # one row of the left factor, its value and one cosine and sine per pair of columns
        each = (rank + HEAD_SIZE) * k.element_size() + HEAD_SIZE * cos.element_size()
        return nbytes(landmarks, right, k, v) + picks.numel() * chunk * each

    return Case(lambda: landmark_topk(layer.q, landmarks, chunks), attend, wanted, read)


def sekv_10(layer: Layer) -> Case:
    rank, routing, window = 32, 32, 512
    batch, device = layer.batch, layer.k.device
    drawn = torch.randint(16, 113, (layer.tokens // 16,))
    lengths = drawn[(drawn + 1).cumsum(0) <= layer.tokens - window].to(device)
    count, longest = len(lengths), int(lengths.max())
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    window = layer.tokens - int(offsets[-1]) - count  # what no further span fits into as well
    static = count + window  # an anchor beside each span
    # an expanded span's mean is not attended, which leaves room for a token more
    room = layer.tokens // 10 - static - count
    most = min(count, room // int(lengths.min()))  # spans that fit, however short
    # anchors, window and span means as one list; the means weigh as many tokens as they stand for
    k, v = (x[:, :, : static + count].clone() for x in (layer.k, layer.v))
    weight = torch.cat([torch.zeros(static, device=device), lengths.log()])
    keys = layer.randn(batch, KV_HEADS, count, routing)
    project = layer.randn(KV_HEADS, HEAD_SIZE, routing) / math.sqrt(HEAD_SIZE)
    total = int(offsets[-1])
    # products of half types are rounded to them, which turns near gates around
    slack = SAME if layer.q.dtype == torch.float32 else 0.1
    left = [layer.randn(batch, KV_HEADS, total, rank) for _ in range(2)]
    right = [
        layer.randn(batch, KV_HEADS, count, rank, HEAD_SIZE).div_(math.sqrt(rank)) for _ in range(2)
    ]

    def pick() -> Tensor:
        """Spans whose gate is above one half for some head of the group, best first, to `room`.

        sigmoid(x) > 1/2 is x > 0, and its order is that of x.
        """
        q = layer.q.view(batch, KV_HEADS, GROUP, HEAD_SIZE)
        gates = ((q @ project) @ keys.mT).float() / math.sqrt(routing) + lengths.log()
        best, order = gates.amax(2).topk(most)
        fits = (lengths[order].cumsum(-1) <= room) & (best > 0)
        return order.masked_fill_(~fits, -1)[..., : int(fits.sum(-1).max())]

    def attend(picks: Tensor) -> Tensor:
        expanded = torch.zeros(batch, KV_HEADS, count + 1, dtype=torch.bool, device=device)
        expanded.scatter_(-1, picks.masked_fill(picks < 0, count), True)
        log_size = weight.expand(batch, KV_HEADS, -1).clone()
        log_size[..., static:].masked_fill_(expanded[..., :count], -math.inf)
        coarse = attention(layer.q, k, v, log_size=log_size)
        factors = (left[0], right[0], left[1], right[1])
        fine = span_attention(layer.q, *factors, offsets, picks, longest=longest)
        return merge_states([coarse, fine])[0]

    def wanted(picks: Tensor) -> Tensor:
        def head(b: int, h: int, q: Tensor) -> Tensor:
            gates = (q @ project[h].double()) @ keys[b, h].double().T / math.sqrt(routing)
            gates = (gates + lengths.double().log()).amax(0)
            chosen = picks[b, h][picks[b, h] >= 0]
            taken = torch.zeros(count, dtype=torch.bool, device=device)
            taken[chosen] = True
            used, least = int(lengths[taken].sum()), gates[taken].min()
            fired = ~taken & (gates > slack)
            refuse_unless(used <= room and bool(least > -slack), "sekv_10")
            if bool(fired.any()):
                refuse_unless(bool(least >= gates[fired].max() - slack), "sekv_10")
                refuse_unless(used + longest > room, "sekv_10")
            bounds = [slice(int(offsets[s]), int(offsets[s + 1])) for s in chosen]
            made = [
                torch.cat(
                    [
                        a[b, h, t].double() @ c[b, h, s].double()
                        for s, t in zip(chosen.tolist(), bounds, strict=True)
                    ]
                )
                for a, c in zip(left, right, strict=True)
            ]
            here = torch.cat([torch.ones(static, dtype=torch.bool, device=device), ~taken])
            log_size = torch.cat([made[0].new_zeros(len(made[0])), weight[here].double()])
            mixed_k, mixed_v = (
                torch.cat([far, near[b, h, here].double()])
                for far, near in zip(made, (k, v), strict=True)
            )
            return exact(q, mixed_k, mixed_v, log_size)

        return each_head(layer, head)

    def read(picks: Tensor) -> int:
        chosen = picks[picks >= 0]
        spans, expanded = len(chosen), int(lengths[chosen].sum())
        factors = 2 * rank * (expanded + spans * HEAD_SIZE) * k.element_size()
        spared = spans * 2 * HEAD_SIZE * k.element_size()  # means of expanded spans
        return nbytes(keys, project, k, v) - spared + factors

    return Case(pick, attend, wanted, read)


CASES: dict[str, Callable[[Layer], Case]] = {
    "tokens_1024": tokens_1024,
    "selected_1024": selected_1024,
    "merged_20": merged_20,
    "sentence": sentence,
    "shadow": shadow,
    "sekv_10": sekv_10,
}


def full_kv(layer: Layer, rounds: int) -> Callable[[], Tensor]:
    """SDPA over the whole cache in the faster layout, its result checked first.

    `packed`: the queries of a KV head's group are rows of one matrix, as if they were positions.
    """
    packed = layer.q.view(layer.batch, KV_HEADS, GROUP, HEAD_SIZE)

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


def measure(
    name: str, layer: Layer, full: Callable[[], Tensor], rounds: int
) -> dict[str, str | int | float]:
    """One row, after the case's result was found right."""
    case = CASES[name](layer)
    picks = case.pick()
    agree(name, case.attend(picks), case.wanted(picks), within=WITHIN[layer.q.dtype])
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
    # glibc hands freed memory back to the system, and a step that gets new pages each time waits
    # for them, until a block of this size was freed once, as in any process that loads a model
    block = torch.empty(31 << 20, dtype=torch.uint8)
    del block
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
