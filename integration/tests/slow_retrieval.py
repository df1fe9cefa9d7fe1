"""Decoding of methods that retrieve, by plain loops over numpy float64; no code of `src`."""

from __future__ import annotations

import math

import numpy as np
from slow import attend, best, pooled, segments_with_their_end, softmax, window_scores, windowed


class Decoder:
    """What came after the prompt, and attention over it and over what a subclass chooses.

    `choose(queries)` takes the queries [H_q, D] of one token and gives the tokens of the prompt
    that each KV head attends; `always` are attended beside them.
    """

    def __init__(self, prompt):
        self.prompt = prompt
        self.keys = [[] for _ in prompt.heads]
        self.values = [[] for _ in prompt.heads]
        self.always = []

    def group(self, queries, head):
        size = len(self.prompt.queries) // len(self.prompt.keys)
        return queries[head * size : (head + 1) * size]

    def feed(self, keys, values):
        """Keys and values [H, D] of one token."""
        for head in self.prompt.heads:
            self.keys[head].append(keys[head])
            self.values[head].append(values[head])

    def attend(self, queries, chosen):
        """Outputs [H_q, Dv] of one token whose heads attend `chosen` of the prompt."""
        out = []
        for head in self.prompt.heads:
            _, keys, values = self.prompt.of(head)
            at = [*chosen[head], *self.always]
            own = [keys[t] for t in at] + self.keys[head]
            seen = [values[t] for t in at] + self.values[head]
            out += [attend(q, own, seen, self.prompt.scale) for q in self.group(queries, head)]
        return np.array(out)

    def step(self, queries, keys, values):
        """One decoding step: `(chosen, outputs)`."""
        self.feed(keys, values)
        chosen = self.choose(queries)
        return chosen, self.attend(queries, chosen)

    def held(self):
        """The prompt's tokens that each head may ever attend, but for `always`."""
        return [list(range(self.prompt.tokens))] * len(self.prompt.keys)

    def turn(self, queries, keys, values):
        """Several tokens [n, H, D]: each attends all that is held and the tokens up to itself."""
        out = []
        for q, k, v in zip(queries, keys, values, strict=True):
            self.feed(k, v)
            out.append(self.attend(q, self.held()))
        return np.array(out)


class SlowQuest(Decoder):
    def __init__(self, prompt, budget, page):
        super().__init__(prompt)
        self.budget = budget
        self.pages = [
            list(range(a, min(a + page, prompt.tokens))) for a in range(0, prompt.tokens, page)
        ]

    def choose(self, queries):
        out = []
        for head in self.prompt.heads:
            _, keys, _ = self.prompt.of(head)
            scores = []
            for page in self.pages:
                reach = []
                for q in self.group(queries, head):
                    total = 0.0
                    for d in range(len(q)):
                        low = min(keys[t][d] for t in page)
                        high = max(keys[t][d] for t in page)
                        total += max(q[d] * low, q[d] * high)
                    reach.append(total)
                scores.append(max(reach))
            chosen = []
            for p in sorted(range(len(self.pages)), key=lambda p: (-scores[p], p)):
                chosen += self.pages[p][: self.budget - len(chosen)]
            out.append(sorted(chosen))
        return out


class SlowLow(Decoder):
    """Tokens by their scores in the directions [D, d] of each head."""

    def __init__(self, prompt, budget, bases, alpha=math.inf):
        super().__init__(prompt)
        self.budget, self.bases, self.alpha = budget, bases, alpha

    def choose(self, queries):
        out = []
        for head in self.prompt.heads:
            _, keys, _ = self.prompt.of(head)
            basis = self.bases[head]
            shares = [0.0] * len(keys)
            for q in self.group(queries, head):
                logits = [self.prompt.scale * ((q @ basis) @ (k @ basis)) for k in keys]
                shares = [max(a, b) for a, b in zip(shares, softmax(logits), strict=True)]
            least = math.exp(-self.alpha) * max(shares)
            out.append([t for t in best(shares, self.budget) if shares[t] >= least])
        return out


def principal(prompt, count):
    """The leading principal directions [D, d] of each head's keys."""
    out = []
    for head in prompt.heads:
        _, keys, _ = prompt.of(head)
        values, vectors = np.linalg.eigh(np.cov(np.array(keys).T, bias=True))
        out.append(vectors[:, np.argsort(-values)[:count]])
    return out


def query_directions(prompt, count, last):
    """The leading right singular vectors [D, d] of each group's last queries."""
    out = []
    for head in prompt.heads:
        queries, _, _ = prompt.of(head)
        _, _, rows = np.linalg.svd(np.concatenate([q[-last:] for q in queries]))
        out.append(rows[:count].T)
    return out


class SlowSentenceKV(Decoder):
    def __init__(
        self, prompt, delimiter, budget, *, window, keep, retrieve, hold, per, group, mode, kernel
    ):
        super().__init__(prompt)
        self.window, self.keep, self.hold, self.per = window, keep, hold, per
        self.pooling = mode, kernel
        self.cut = segments_with_their_end(delimiter)
        window, self.retrieved = windowed(budget, window)
        self.earlier = prompt.tokens - window
        self.always = list(range(self.earlier, prompt.tokens))
        self.keep_best(window_scores(prompt, window, per_head=per == "kv_head"))
        self.how, self.over = retrieve, {"mean": np.mean, "max": np.max}[group]
        self.cache, self.ended, self.chosen, self.asked = [], False, None, []

    def keep_best(self, scores):
        """Of these scores of each head, the sentences of the tokens that are kept, their means."""
        self.scores = [pooled(s, *self.pooling) for s in scores]
        self.sentences, self.means = [], []
        for head in self.prompt.heads:
            _, keys, _ = self.prompt.of(head)
            stored = best(self.scores[head], math.ceil(self.keep * self.retrieved))
            kept = [[t for t in s if t in stored] for s in self.cut]
            kept = [s for s in kept if s]
            self.sentences.append(kept)
            self.means.append([sum(keys[t] for t in s) / len(s) for s in kept])

    def held(self):
        if self.hold == "prompt":
            return [list(range(self.earlier))] * len(self.prompt.keys)
        return [[t for s in own for t in s] for own in self.sentences]

    def turn(self, queries, keys, values, *, ends):
        for q, end in zip(queries, ends, strict=True):
            self.look(q, ends=end)
        before = len(self.keys[0])
        out = super().turn(queries, keys, values)
        self.chosen = None
        for number, q in enumerate(queries, before + 1):
            self.asked.append([self.paid(q, head, number) for head in self.prompt.heads])
        return out

    def paid(self, queries, head, came):
        """What a token that sees `came` later ones pays to the earlier tokens: its group's mean."""
        _, keys, _ = self.prompt.of(head)
        seen = [*keys, *self.keys[head][:came]]
        own = self.group(queries, head)
        weights = [softmax([self.prompt.scale * (q @ k) for k in seen]) for q in own]
        return [sum(w[t] for w in weights) / len(own) for t in range(self.earlier)]

    def keep_anew(self):
        asked, self.asked = np.array(self.asked[-self.window :]).sum(0), []
        if self.per == "layer":
            asked = [asked.mean(0)] * len(asked)
        self.keep_best([list(s) for s in asked])

    def step(self, queries, keys, values, *, ends):
        self.look(queries, ends=ends)
        return super().step(queries, keys, values)

    def look(self, queries, *, ends):
        """A token's queries join those of its sentence, or begin the next one."""
        if self.ended and not ends:
            self.cache = []
        self.cache.append(queries)
        self.ended = ends

    def choose(self, queries):
        if self.hold == "prompt" and self.asked:
            self.keep_anew()
        if self.how == "sentence" and self.chosen is not None and not self.ended:
            return self.chosen
        mean = sum(self.cache) / len(self.cache)
        self.chosen = []
        for head in self.prompt.heads:
            similar = [self.over([q @ m for q in self.group(mean, head)]) for m in self.means[head]]
            chosen = []
            for s in sorted(range(len(similar)), key=lambda s: (-similar[s], s)):
                left = self.retrieved - len(chosen)
                chosen += best(self.scores[head], left, self.sentences[head][s])
            self.chosen.append(sorted(chosen))
        return self.chosen
