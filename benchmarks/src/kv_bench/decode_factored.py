"""Cases of a decoding step whose keys are held as low-rank factors: ShadowKV and SeKV."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kv_attn_triton import (
    attention,
    landmark_topk,
    lowrank_attention,
    merge_states,
    span_attention,
)
from kv_bench.decode_layer import GROUP, SAME, Case, Layer, each_head, exact, nbytes, refuse_unless
from kv_bench.llama_layer import HEAD_SIZE, KV_HEADS


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
