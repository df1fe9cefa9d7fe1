"""Attention of one decoding step, as each method does it.

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
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kv_attn_triton import attention, merge_states, selected_attention
from kv_bench.decode_factored import sekv_10, shadow
from kv_bench.decode_layer import SAME, Case, Layer, each_head, exact, nbytes, refuse_unless
from kv_bench.llama_layer import HEAD_SIZE, KV_HEADS
from kv_policies import top_segments
from kv_score import segment_scores


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


CASES: dict[str, Callable[[Layer], Case]] = {
    "tokens_1024": tokens_1024,
    "selected_1024": selected_1024,
    "merged_20": merged_20,
    "sentence": sentence,
    "shadow": shadow,
    "sekv_10": sekv_10,
}
