"""SeKV by plain loops over numpy float64: what the paper says, sharing no code with `src`."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np


def boundaries(surprisal, alpha):
    """Section 3.1: positions whose surprisal is above mean + alpha * std."""
    mean = sum(surprisal) / len(surprisal)
    deviation = math.sqrt(sum((h - mean) ** 2 for h in surprisal) / len(surprisal))
    return [h > mean + alpha * deviation for h in surprisal]


def segment(marks, first, stop, *, min_length, max_length, trail=0, anchors=True):
    """Exact positions and spans (lists of positions) of the tokens first .. stop - 1.

    The `trail` tokens after an anchor are exact, too."""
    runs = []
    for t in range(first, stop):
        anchor = anchors and any(marks[max(first, t - trail) : t + 1])
        opens = not runs or marks[t] or (anchors and runs[-1][1])
        if opens:
            runs.append(([], anchor))
        runs[-1][0].append(t)
    exact, spans = [], []
    for run, anchor in runs:
        if anchor or (len(run) < min_length and len(runs) > 1):
            exact += run
        elif max_length is None or len(run) <= max_length:
            spans.append(run)
        else:
            parts = math.ceil(len(run) / max_length)
            cuts = [i * len(run) // parts for i in range(parts + 1)]
            spans += [run[a:b] for a, b in pairwise(cuts)]
    return exact, spans


def shares(tokens, granted, window, sinks):
    """First position after the sinks, first of the window."""
    window = min(window, max(granted // 4, 1))
    return min(sinks, granted - window), tokens - window


class Head:
    """One KV head's memory: its exact tokens, and each span's mean, summary and factors."""

    def __init__(self, keys, values, exact, spans, weights, projections, gates, max_rank):
        self.exact = [(keys[t], values[t]) for t in exact]
        self.spans = spans
        self.means, self.summaries, self.rebuilt = [], [], []
        for number, span in enumerate(spans):
            total = sum(weights[t] for t in span)
            mean_key = sum(weights[t] / total * keys[t] for t in span)
            mean_value = sum(weights[t] / total * values[t] for t in span)
            self.means.append((mean_key, mean_value))
            own = []
            for w in projections:  # one per query head of the group
                routed = sum(weights[t] / total * (w @ keys[t]) for t in span)
                own.append(routed / np.linalg.norm(routed))
            self.summaries.append(own)
            both = []
            for kind, matrix in (("key", keys[span]), ("value", values[span])):
                u, sigma, vh = np.linalg.svd(matrix, full_matrices=False)
                rank = min(max_rank, len(sigma))
                gate = gates(kind, number, sigma[:rank], own)
                kept = [i for i in range(rank) if gate[i] >= 0.05]
                both.append(
                    sum(
                        (gate[i] * sigma[i] * np.outer(u[:, i], vh[i]) for i in kept),
                        np.zeros_like(matrix),
                    )
                )
            self.rebuilt.append(both)

    def relevance(self, query, w, member, span):
        """Eq. 5 before the sigmoid."""
        routed = w @ query
        score = routed @ self.summaries[span][member] / math.sqrt(len(routed))
        return score + math.log(len(self.spans[span]))


def step(head, group, projections, thresholds, generated, room, scale):
    """Queries [G, D] of one token in one KV head's group: outputs, and the spans it expanded.

    thresholds: tau of each query head. Also the smallest margin by which any decision was made.
    """
    wanted, margin = {}, math.inf
    for member, query in enumerate(group):
        for s in range(len(head.spans)):
            x = head.relevance(query, projections[member], member, s)
            tau = thresholds[member]
            limit = -math.inf if tau <= 0 else math.inf if tau >= 1 else math.log(tau / (1 - tau))
            if len(head.spans[s]) - 1 > room:
                continue  # it can never be expanded and stands in nobody's way
            margin = min(margin, abs(x - limit))
            if x > limit:
                wanted[s] = max(x, wanted.get(s, -math.inf))
    chosen, left = [], room
    ranked = sorted(wanted, key=lambda s: -wanted[s])
    for a, b in pairwise(ranked):
        margin = min(margin, wanted[a] - wanted[b])
    for s in ranked:
        if len(head.spans[s]) - 1 > left:
            break
        left -= len(head.spans[s]) - 1
        chosen.append(s)
    entries = [(k, v, 0.0) for k, v in (*head.exact, *generated)]
    for s, span in enumerate(head.spans):
        if s in chosen:
            keys, values = head.rebuilt[s]
            entries += [(k, v, 0.0) for k, v in zip(keys, values, strict=True)]
        else:
            entries.append((*head.means[s], math.log(len(span))))
    out = []
    for query in group:
        logits = [scale * (query @ k) + bonus for k, _, bonus in entries]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        total = sum(weights)
        out.append(sum(w / total * v for w, (_, v, _) in zip(weights, entries, strict=True)))
    return np.stack(out), chosen, margin


def leading(keys, size):
    """The first right singular vectors of keys [N, D]."""
    return np.linalg.svd(keys, full_matrices=True)[2][:size]


def quantile_threshold(scores, quantile):
    """The score below which a share `quantile` of them lies, as a sigmoid."""
    ranked = sorted(scores)
    x = ranked[min(int(quantile * len(ranked)), len(ranked) - 1)]
    return 1 / (1 + math.exp(-x))


def rank_gates(router, layer, kind, sigma, summaries):
    """Eq. 7 by the predictor's own weights, for the mean summary of the group's heads."""
    parts = {name: np.float64(x.detach()) for name, x in router.predictor.named_parameters()}
    padded = np.zeros(router.max_rank)
    padded[: len(sigma)] = sigma
    seen = np.concatenate([np.log1p(padded), padded / padded[0], np.mean(summaries, 0)])
    inner = parts["enter.weight"] @ seen + parts["enter.bias"]
    inner = inner + parts["shift"][layer, ["key", "value"].index(kind)]
    inner = inner / (1 + np.exp(-inner))
    out = parts["leave.weight"] @ inner + parts["leave.bias"]
    return (1 / (1 + np.exp(-out)))[: len(sigma)]
