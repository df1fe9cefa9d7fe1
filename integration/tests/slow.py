"""Methods by plain loops over numpy float64: what the papers say, sharing no code with `src`."""

from __future__ import annotations

import math

import numpy as np
import torch


class Prompt:
    """A random row of one layer: queries [H_q, T, D], keys and values [H, T, D], scale."""

    def __init__(self, seed, *, tokens=50, groups=2, heads=2, dim=4, sharp=2.0):
        draw = torch.Generator().manual_seed(seed)
        self.queries = sharp * torch.randn(groups * heads, tokens, dim, generator=draw)
        self.keys = torch.randn(heads, tokens, dim, generator=draw)
        self.values = torch.randn(heads, tokens, dim + 1, generator=draw)
        self.scale = 0.4

    def of(self, head):
        """Queries [G, T, D] of a KV head's group, its keys and values, in float64."""
        group = len(self.queries) // len(self.keys)
        queries = self.queries[head * group : (head + 1) * group]
        return (np.float64(x) for x in (queries, self.keys[head], self.values[head]))

    @property
    def heads(self):
        return range(len(self.keys))

    @property
    def tokens(self):
        return self.keys.shape[1]


def softmax(logits):
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def attend(query, keys, values, scale, log_size=None):
    """One query over a list of entries."""
    bonus = [0.0] * len(keys) if log_size is None else log_size
    weights = softmax([scale * (query @ k) + b for k, b in zip(keys, bonus, strict=True)])
    return sum(w * v for w, v in zip(weights, values, strict=True))


def received(prompt, head, first_query):
    """Attention that each token gets from the queries from `first_query` on, mean of the group."""
    queries, keys, _ = prompt.of(head)
    total = [0.0] * len(keys)
    for member in queries:
        for i in range(first_query, len(keys)):
            weights = softmax([prompt.scale * (member[i] @ k) for k in keys[: i + 1]])
            for j, w in enumerate(weights):
                total[j] += w / len(queries)
    return total


def window_scores(prompt, window, *, per_head):
    """What the last `window` queries pay to each token before them: a list for each head."""
    earlier = prompt.tokens - window
    scores = [received(prompt, head, earlier)[:earlier] for head in prompt.heads]
    if per_head:
        return scores
    return [[sum(s[j] for s in scores) / len(scores) for j in range(earlier)]] * len(scores)


def pooled(scores, mode, kernel):
    """Mean or maximum of the neighbours that there are."""
    if mode == "none":
        return scores
    out, reach = [], kernel // 2
    for j in range(len(scores)):
        near = scores[max(j - reach, 0) : j + reach + 1]
        out.append(max(near) if mode == "max" else sum(near) / len(near))
    return out


def best(scores, count, among=None):
    """The `count` highest of these positions, ascending; ties go to the earlier one."""
    among = range(len(scores)) if among is None else among
    return sorted(sorted(among, key=lambda j: (-scores[j], j))[:count])


def windowed(budget, window):
    """How a budget is split between the latest tokens and the others."""
    kept = min(window, max(budget // 4, 1))
    return kept, budget - kept


def snapkv(prompt, budget, window, mode, kernel):
    window, selected = windowed(budget, window)
    latest = list(range(prompt.tokens - window, prompt.tokens))
    scores = window_scores(prompt, window, per_head=True)
    return [best(pooled(s, mode, kernel), selected) + latest for s in scores]


def chunkkv(prompt, budget, window, chunk, mode="none", kernel=1):
    window, left = windowed(budget, window)
    earlier = prompt.tokens - window
    scores = pooled(window_scores(prompt, window, per_head=False)[0], mode, kernel)
    chunks = [list(range(a, min(a + chunk, earlier))) for a in range(0, earlier, chunk)]
    chunks.sort(key=lambda c: (-sum(scores[j] for j in c) / len(c), c[0]))
    kept = list(range(earlier, prompt.tokens))
    for one in chunks:
        kept += best(scores, left, one)
        left = max(left - len(one), 0)
    return [sorted(kept)] * len(prompt.keys)


def segments_with_their_end(delimiter):
    """A segment ends with its delimiter, or with the run of them: lists of positions."""
    out = [[]]
    for t, is_end in enumerate(delimiter):
        if t and delimiter[t - 1] and not is_end:
            out.append([])
        out[-1].append(t)
    return out


def sablock(prompt, delimiter, budget, *, window, beta, lam, max_block, delta, mode, kernel):
    window, selected = windowed(budget, window)
    earlier = prompt.tokens - window
    scores = pooled(window_scores(prompt, window, per_head=False)[0], mode, kernel)
    segments = segments_with_their_end(delimiter[:earlier])
    means = [sum(scores[j] for j in s) / len(s) for s in segments]
    guided = [0.0] * earlier
    for segment, mean in zip(segments, means, strict=True):
        total = sum(scores[j] for j in segment)
        shares = [scores[j] / total for j in segment]
        spread = 0.0
        if len(segment) > 1:
            spread = -sum(p * math.log(p) for p in shares) / math.log(len(segment))
        weight = (mean / max(means) + beta * spread) ** lam
        for j in segment:
            guided[j] = scores[j] * weight
    top, kept = set(best(guided, selected)), []
    for segment in segments:
        kept += blocks(guided, segment, len(top & set(segment)), max_block, delta)
    return [sorted(kept) + list(range(earlier, prompt.tokens))] * len(prompt.keys)


def blocks(scores, segment, quota, max_block, delta):
    """Algorithm 2: the longest blocks that keep `delta` of what the best tokens would."""
    wanted = delta * sum(scores[j] for j in best(scores, quota, segment))
    for size in range(min(max_block, quota), 0, -1):
        cut = [segment[a : a + size] for a in range(0, len(segment), size)]
        cut.sort(key=lambda b: (-sum(scores[j] for j in b) / len(b), b[0]))
        kept = []
        for block in cut:
            kept += best(scores, quota - len(kept), block)
        if sum(scores[j] for j in kept) >= wanted - 1e-12:
            return kept
    return []


def heavy(scores, budget, recent):
    """The latest, and those with the highest scores among the others."""
    latest = math.ceil(recent * budget)
    cut = len(scores) - latest
    return best(scores, budget - latest, range(cut)) + list(range(cut, len(scores)))


def clusters(keys, chunks, theta):
    """Greedy seeds: the first free token absorbs the later ones of its chunk that are similar."""

    def cosine(a, b):
        return (a @ b) / math.sqrt((a @ a) * (b @ b))

    out = []
    for chunk in chunks:
        free = list(chunk)
        while free:
            seed, *rest = free
            near = [t for t in rest if theta < 1 and cosine(keys[seed], keys[t]) > theta]
            out.append([seed, *near])
            free = [t for t in rest if t not in near]
    return out


def chunks_between(delimiter):
    """Delimiters alone, and what is between them."""
    out = []
    for t, alone in enumerate(delimiter):
        if not out or alone or delimiter[t - 1]:
            out.append([])
        out[-1].append(t)
    return out
