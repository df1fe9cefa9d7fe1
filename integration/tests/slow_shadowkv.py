"""ShadowKV and ShadowKV+ by plain loops over numpy float64, sharing no code with `src`.

Algorithms 1 and 2 of the paper for one row of one layer, and section 4.1 for what is generated.
"""

from __future__ import annotations

import math

import numpy as np


def turned(key, angles, pairs, *, back=False):
    """A key after RoPE (before it: `back`); `angles` (cos, sin) of each pair of channels."""
    out = np.array(key, dtype=np.float64)
    for (i, j), (c, s) in zip(pairs, angles, strict=True):
        a, b = out[i], out[j]
        if back:
            norm = c * c + s * s
            out[i], out[j] = (a * c + b * s) / norm, (b * c - a * s) / norm
        else:
            out[i], out[j] = a * c - b * s, b * c + a * s
    return out


def pairs_of(width, layout):
    """Channels that RoPE turns together, `width` of them in all."""
    half = width // 2
    if layout == "half":
        return [(i, i + half) for i in range(half)]
    return [(2 * i, 2 * i + 1) for i in range(half)]


def shares(budget, tokens, *, chunk, window, outliers):
    """Exact tokens, chunks, outlier chunks, chunks selected."""
    tail = tokens % chunk
    while tail < window and tail + chunk <= budget // 2:
        tail += chunk
    if tail + chunk > budget:
        return budget, 0, 0, 0
    chunks = (tokens - tail) // chunk
    fitting = min((budget - tail) // chunk, chunks)
    static = 0 if chunk == 1 else min(outliers, fitting // 2)
    return tail, chunks, static, fitting - static


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def nearness(a, b):
    return -math.sqrt((a - b) @ (a - b))


class Shadow:
    """keys, values [H, T, D] of a prompt, the keys after RoPE by `angle(token)` -> (cos, sin)s."""

    def __init__(
        self, keys, values, angle, pairs, budget, *, chunk, window, outliers, rule, rank, scale
    ):
        self.angle, self.pairs, self.scale, self.chunk = angle, pairs, scale, chunk
        self.keys, self.values = ([list(np.float64(x)) for x in each] for each in (keys, values))
        heads, tokens = len(self.keys), len(self.keys[0])
        self.heads = range(heads)
        exact, chunks, static, self.selected = shares(
            budget, tokens, chunk=chunk, window=window, outliers=outliers
        )
        self.share = self.selected, chunks - static
        plain = [[self.plain(h, t) for h in self.heads] for t in range(tokens)]
        left, sigma, right = np.linalg.svd(np.array([np.concatenate(row) for row in plain]))
        rank = min(rank, tokens)
        right = right[:rank]
        self.right = np.split(right, heads, axis=1)  # [r, D] of each head
        self.left = [left[t, :rank] * sigma[:rank] for t in range(chunks * chunk)]
        self.exact = list(range(tokens - exact, tokens))
        self.chunks = [self.chunk_at(a) for a in range(0, chunks * chunk, chunk)]
        self.fit = {"cosine": cosine, "distance": nearness}[rule]
        self.outliers = [self.worst(h, static) for h in self.heads]

    def plain(self, head, token):
        return turned(self.keys[head][token], self.angle(token), self.pairs, back=True)

    def chunk_at(self, first):
        return list(range(first, first + self.chunk))

    def mean(self, head, tokens):
        return sum(self.keys[head][t] for t in tokens) / len(tokens)

    def worst(self, head, count):
        """Chunks of which some key fits their mean least."""
        lowest = []
        for number, tokens in enumerate(self.chunks):
            mean = self.mean(head, tokens)
            lowest.append((min(self.fit(self.keys[head][t], mean) for t in tokens), number))
        return [number for _, number in sorted(lowest)[:count]]

    def scores(self, head, queries):
        """S_2 of every chunk that is no outlier; queries [G, Q, D]."""
        free = [n for n in range(len(self.chunks)) if n not in self.outliers[head]]
        best = dict.fromkeys(free, 0.0)
        for member in queries:
            total = dict.fromkeys(free, 0.0)
            for query in member:
                logits = {n: self.scale * query @ self.mean(head, self.chunks[n]) for n in free}
                top = max(logits.values())
                whole = sum(math.exp(x - top) for x in logits.values())
                for n in free:
                    total[n] += math.exp(logits[n] - top) / whole
            best = {n: max(best[n], total[n]) for n in free}
        return best

    def step(self, queries, keys, values):
        """New tokens: queries [H_q, Q, D], keys, values [H, Q, D] -> outputs, picks of each head.

        One token attends the chunks that it picks, several attend all. And by how much the last
        pick was better than the first that was not taken.
        """
        count = len(keys[0])
        for h in self.heads:
            self.keys[h] += list(np.float64(keys[h]))
            self.values[h] += list(np.float64(values[h]))
        first = len(self.keys[0]) - count
        self.exact += range(first, first + count)
        group = len(queries) // len(self.keys)
        outputs, picks, margins = [], [], [math.inf]
        for h in self.heads:
            own = np.float64(queries[h * group : (h + 1) * group])
            scores = self.scores(h, own[:, -1:]) if self.selected else {}
            order = sorted(scores, key=lambda n: (-scores[n], n))
            taken = self.selected if count == 1 else len(order)
            chosen, others = order[:taken], order[taken:]
            if chosen and others:
                margins.append(scores[chosen[-1]] / scores[others[0]] - 1)
            picks.append(sorted(chosen))
            entries = [t for n in self.outliers[h] for t in self.chunks[n]]
            found = [(t, self.keys[h][t]) for t in entries + self.exact]
            for t in (t for n in chosen for t in self.chunks[n]):
                rebuilt = self.left[t] @ self.right[h]
                found.append((t, turned(rebuilt, self.angle(t), self.pairs)))
            for member in own:
                for j, query in enumerate(member):
                    seen = [(t, key) for t, key in found if t <= first + j]
                    weights = np.array([self.scale * query @ key for _, key in seen])
                    weights = np.exp(weights - weights.max())
                    weights /= weights.sum()
                    outputs.append(
                        sum(w * self.values[h][t] for w, (t, _) in zip(weights, seen, strict=True))
                    )
        return np.array(outputs).reshape(len(queries), count, -1), picks, min(margins)

    def move(self, recent):
        """Section 4.1: before a step, exact tokens beyond the `recent` latest become chunks."""
        beyond = len(self.exact) - recent
        if beyond < max(recent // 8, self.chunk):
            return
        for _ in range(beyond // self.chunk):
            tokens, self.exact = self.exact[: self.chunk], self.exact[self.chunk :]
            for t in tokens:
                plain = [self.plain(h, t) for h in self.heads]
                self.left.append(sum(b @ x for b, x in zip(self.right, plain, strict=True)))
            self.chunks.append(tokens)
        selected, free = self.share
        static = len(self.outliers[0])
        everything = len(self.chunks) - static
        self.selected = selected * everything // free if free else everything
