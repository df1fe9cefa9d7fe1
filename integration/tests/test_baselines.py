"""The baselines against plain loops: what they keep, merge and attend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import slow
import torch
from families import prompt as words

from kv_integration import D2O, H2O, TOVA, CaM, ChunkKV, PyramidKV, SABlock, SnapKV, StreamingLLM
from kv_integration.baselines.d2o import best_match
from kv_integration.method import Context, Row

SEEDS = pytest.mark.parametrize("seed", range(4))
SHAPES = pytest.mark.parametrize(
    ("heads", "groups"), [(2, 2), (1, 4), (3, 1)], ids=["gqa", "mqa", "mha"]
)


def compress(method, prompt, *, ids=None, tokenizer=None, **row):
    """The state of one layer after this prompt; entries know their positions."""
    plan = method.begin([torch.zeros(prompt.tokens) if ids is None else ids], Context(tokenizer))
    plan.settle(recompress=True)
    last = min(max(method.observe, 1), prompt.tokens)
    queries = prompt.queries[None, :, prompt.tokens - last :]
    parts = queries, prompt.keys[None], prompt.values[None]
    return method.compress([Row(0, *parts, prompt.scale, **row)], plan)


def held(state, prompt):
    """Positions, keys and values of each head's entries."""
    entries = state.recall(0, prompt.tokens)
    at = entries.positions[0].expand(len(prompt.keys), -1)
    return [
        (at[h].tolist(), np.float64(entries.keys[0, h]), np.float64(entries.values[0, h]))
        for h in prompt.heads
    ]


def check_kept(state, prompt, expected):
    """The state holds these positions, with the keys and values that stood there."""
    for head, (at, keys, values) in enumerate(held(state, prompt)):
        assert at == expected[head]
        assert np.array_equal(keys, np.float64(prompt.keys[head, at]))
        assert np.array_equal(values, np.float64(prompt.values[head, at]))


@SEEDS
@SHAPES
@pytest.mark.parametrize("pooling", [("avg", 7), ("avg", 5), ("max", 3), ("none", 1)], ids=str)
def test_snapkv_keeps_what_the_window_looks_at(seed, heads, groups, pooling):
    prompt = slow.Prompt(seed, heads=heads, groups=groups)
    method = SnapKV(budget=17, window=5, pooling=pooling[0], kernel=pooling[1])
    check_kept(compress(method, prompt), prompt, slow.snapkv(prompt, 17, 5, *pooling))


@SEEDS
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 49, 50, 60])
def test_small_and_large_budgets(seed, budget):
    """A quarter of a small budget is for the window; one as large as the prompt keeps all."""
    prompt = slow.Prompt(seed)
    kept = slow.snapkv(prompt, budget, 8, "avg", 7)
    if budget >= 50:
        kept = [list(range(50))] * 2
    check_kept(compress(SnapKV(budget=budget, window=8), prompt), prompt, kept)


@SEEDS
@pytest.mark.parametrize("beta", [1.0, 2.0, 5.0])
def test_pyramidkv_gives_the_first_layers_more(seed, beta):
    prompt, layers, mean = slow.Prompt(seed), 5, 16
    method = PyramidKV(budget=mean, window=3, beta=beta)
    counts = []
    for layer in range(layers):
        state = compress(method, prompt, layer=layer, layers=layers)
        count = int(state.entries()[0, 0])
        check_kept(state, prompt, slow.snapkv(prompt, count, 3, "avg", 7))
        counts.append(count)
    last = mean / beta
    line = [2 * mean - last + (2 * last - 2 * mean) * i / (layers - 1) for i in range(layers)]
    assert sum(counts) == layers * mean
    assert counts == sorted(counts, reverse=True)
    assert all(abs(count - wanted) < 1 for count, wanted in zip(counts, line, strict=True))


@SEEDS
@SHAPES
@pytest.mark.parametrize("chunk", [1, 4, 10])
@pytest.mark.parametrize("pooling", [("none", 5), ("avg", 5), ("max", 3)], ids=str)
def test_chunkkv_keeps_whole_chunks(seed, heads, groups, chunk, pooling):
    prompt = slow.Prompt(seed, heads=heads, groups=groups)
    method = ChunkKV(budget=19, window=5, chunk=chunk, pooling=pooling[0], kernel=pooling[1])
    check_kept(compress(method, prompt), prompt, slow.chunkkv(prompt, 19, 5, chunk, *pooling))


@SEEDS
@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.5, "lam": 0.5, "max_block": 9, "delta": 0.9},
        {"beta": 2.0, "lam": 1.5, "max_block": 4, "delta": 0.7},
        {"beta": 0.5, "lam": 0.0, "max_block": 9, "delta": 0.8},
        {"beta": 0.0, "lam": 1.0, "max_block": 1, "delta": 0.9},
        {"beta": 0.5, "lam": 0.5, "max_block": 5, "delta": 0.0},
        {"beta": 0.5, "lam": 0.5, "max_block": 10, "delta": 0.0},
    ],
    ids=["default", "strong", "no guidance", "tokens", "fixed 5", "fixed 10"],
)
@pytest.mark.parametrize("pooling", [("max", 7), ("none", 1)], ids=str)
def test_sablock_keeps_adaptive_blocks(tokenizer, seed, options, pooling):
    prompt = slow.Prompt(seed, tokens=60)
    ids = words(60, seed=seed)["input_ids"][0]
    method = SABlock(budget=24, window=6, pooling=pooling[0], kernel=pooling[1], **options)
    expected = slow.sablock(
        prompt,
        [i % 8 == 0 for i in ids.tolist()],
        24,
        window=6,
        mode=pooling[0],
        kernel=pooling[1],
        **options,
    )
    check_kept(compress(method, prompt, ids=ids, tokenizer=tokenizer), prompt, expected)


@pytest.mark.parametrize("tokens", [3, 10, 30])
@pytest.mark.parametrize(("budget", "sinks"), [(8, 4), (8, 0), (5, 4), (3, 4), (1, 4), (40, 2)])
def test_streamingllm_attends_sinks_and_the_latest(tokens, budget, sinks):
    """Queries of zero average the values, which spell the positions."""
    steps = 30
    eye = torch.eye(tokens + steps)
    prompt = slow.Prompt(0, tokens=tokens, heads=1)
    prompt.values = eye[None, :tokens]
    method = StreamingLLM(budget=budget, sinks=sinks)
    state = compress_without_positions(method, prompt)
    sinks = min(sinks, budget - 1)
    for step in range(steps):
        now = tokens + step
        key, value = torch.randn(1, 1, 1, 4), eye[now].view(1, 1, 1, -1)
        out = state.step(torch.zeros(1, 2, 1, 4), key, value, valid=None, scale=1.0)
        recent = range(now + 1 - (budget - sinks), now + 1)
        expected = [t for t in range(now + 1) if t < sinks or t in recent]
        assert out[0, 0, 0].nonzero()[:, 0].tolist() == expected
        torch.testing.assert_close(out[0, 1, 0].amax(), torch.tensor(1 / len(expected)))


@pytest.mark.parametrize(("tokens", "pieces"), [(6, (3, 5)), (20, (4, 13, 1)), (20, (2,))])
def test_streamingllm_takes_several_tokens_at_once(tokens, pieces):
    """They see the window as it was before them, and each other."""
    budget, sinks, eye = 8, 2, torch.eye(tokens + sum(pieces))
    prompt = slow.Prompt(0, tokens=tokens, heads=1)
    prompt.values = eye[None, :tokens]
    state = compress_without_positions(StreamingLLM(budget=budget, sinks=sinks), prompt)
    seen = tokens
    for count in pieces:
        keys, values = torch.randn(1, 1, count, 4), eye[None, None, seen : seen + count]
        out = state.step(torch.zeros(1, 2, count, 4), keys, values, valid=None, scale=1.0)
        oldest = seen - (budget - sinks) + (count == 1)  # a token alone takes the oldest's place
        before = [t for t in range(seen) if t < sinks or t >= oldest]
        for i in range(count):
            expected = before + list(range(seen, seen + i + 1))
            assert out[0, 0, i].nonzero()[:, 0].tolist() == expected
        seen += count


def compress_without_positions(method, prompt, **where):
    last = min(max(method.observe, 1), prompt.tokens)
    parts = prompt.queries[None, :, prompt.tokens - last :], prompt.keys[None], prompt.values[None]
    row = Row(0, *parts, prompt.scale, **where)
    return method.compress([row], method.begin([], Context(None)))


class SlowH2O:
    """H2O for one KV head: a dict from position to score, key and value."""

    def __init__(self, prompt, head, budget, recent):
        _, keys, values = prompt.of(head)
        self.budget, self.scale, self.seen = budget, prompt.scale, prompt.tokens
        self.recent = math.ceil(recent * budget)
        self.keys, self.values = dict(enumerate(keys)), dict(enumerate(values))
        self.score = dict(enumerate(slow.received(prompt, head, 0)))
        self.evict()

    def evict(self):
        while len(self.score) > self.budget:
            old = [t for t in self.score if t < self.seen - self.recent]
            lowest = min(old, key=lambda t: (self.score[t], -t))
            for table in (self.score, self.keys, self.values):
                del table[lowest]

    def add(self, key, value):
        self.keys[self.seen], self.values[self.seen] = key, value
        self.score[self.seen] = 0.0
        self.seen += 1

    def attend(self, queries, until=None):
        """Queries [G, D] of one token; what they pay is added to the scores."""
        held = [t for t in self.score if until is None or t <= until]
        out = []
        for query in queries:
            weights = slow.softmax([self.scale * (query @ self.keys[t]) for t in held])
            out.append(sum(w * self.values[t] for w, t in zip(weights, held, strict=True)))
            for w, t in zip(weights, held, strict=True):
                self.score[t] += w / len(queries)
        return out


@SEEDS
@SHAPES
@pytest.mark.parametrize("recent", [0.5, 0.2, 1.0])
@pytest.mark.parametrize("tokens", [40, 9])
def test_h2o_goes_on_accumulating(seed, heads, groups, recent, tokens):
    prompt = slow.Prompt(seed, tokens=tokens, heads=heads, groups=groups)
    state = compress_without_positions(H2O(budget=12, recent=recent), prompt)
    loops = [SlowH2O(prompt, head, 12, recent) for head in prompt.heads]
    draw = torch.Generator().manual_seed(100 + seed)

    def new(count):
        return (
            torch.randn(1, n, count, d, generator=draw)
            for n, d in ((heads * groups, 4), (heads, 4), (heads, 5))
        )

    for count in (1, 1, 1, 1, 3, 1, 1, 7, 1, 1):
        queries, keys, values = new(count)
        out = state.step(queries, keys, values, valid=None, scale=prompt.scale)
        for head, loop in enumerate(loops):
            own = np.float64(queries[0, head * groups : (head + 1) * groups])
            first = loop.seen
            for i in range(count):
                loop.add(np.float64(keys[0, head, i]), np.float64(values[0, head, i]))
            if count == 1:
                loop.evict()  # a token alone takes its place before it attends
            for i in range(count):
                expected = loop.attend(own[:, i], first + i)
                ours = out[0, head * groups : (head + 1) * groups, i]
                np.testing.assert_allclose(ours, expected, atol=1e-5)
            loop.evict()
        live = state.position[0]
        for head, loop in enumerate(loops):
            kept = [t for t in live[head].tolist() if t >= 0]
            assert sorted(kept) == sorted(loop.score)
            scores = dict(zip(live[head].tolist(), state.score[0, head].tolist(), strict=True))
            for t, score in loop.score.items():
                assert scores[t] == pytest.approx(score, abs=1e-4)


class SlowTOVA:
    """TOVA for one layer: a dict from position to what the latest query paid, all heads' mean."""

    def __init__(self, prompt, budget):
        self.budget, self.scale, self.heads = budget, prompt.scale, len(prompt.heads)
        self.keys, self.values = np.float64(prompt.keys), np.float64(prompt.values)
        self.held = list(range(prompt.tokens))
        self.attend(np.float64(prompt.queries)[:, -1], self.held)
        self.evict(budget)

    def evict(self, size):
        while len(self.held) > size:
            self.held.remove(min(self.held, key=lambda t: self.score[t]))

    def add(self, keys, values):
        """Of several tokens: [H, n, D]."""
        first = self.keys.shape[1]
        self.keys = np.concatenate([self.keys, keys], 1)
        self.values = np.concatenate([self.values, values], 1)
        self.held += range(first, self.keys.shape[1])
        return first

    def attend(self, queries, seen):
        """Queries [H_q, D] of one token over the entries `seen`: [H_q, D_v]."""
        group = len(queries) // self.heads
        out, self.score = [], dict.fromkeys(seen, 0.0)
        for number, query in enumerate(queries):
            keys, values = self.keys[number // group], self.values[number // group]
            weights = slow.softmax([self.scale * (query @ keys[t]) for t in seen])
            out.append(sum(w * values[t] for w, t in zip(weights, seen, strict=True)))
            for w, t in zip(weights, seen, strict=True):
                self.score[t] += w
        return out


@SEEDS
@SHAPES
@pytest.mark.parametrize("tokens", [40, 9])
def test_tova_forgets_what_the_latest_token_looks_at_least(seed, heads, groups, tokens):
    prompt = slow.Prompt(seed, tokens=tokens, heads=heads, groups=groups)
    state = compress_without_positions(TOVA(budget=12), prompt)
    loop = SlowTOVA(prompt, 12)
    draw = torch.Generator().manual_seed(100 + seed)
    for count in (1, 1, 1, 1, 3, 1, 1, 7, 1, 1):
        queries, keys, values = (
            torch.randn(1, n, count, d, generator=draw)
            for n, d in ((heads * groups, 4), (heads, 4), (heads, 5))
        )
        out = state.step(queries, keys, values, valid=None, scale=prompt.scale)
        if count == 1:
            loop.evict(11)  # the paper's state, which the new token joins
        first = loop.add(np.float64(keys[0]), np.float64(values[0]))
        for i in range(count):
            seen = [t for t in loop.held if t <= first + i]
            expected = loop.attend(np.float64(queries[0, :, i]), seen)
            np.testing.assert_allclose(out[0, :, i], expected, atol=1e-5)
        loop.evict(12)
        assert state.entries().tolist() == [[len(loop.held)] * heads]
        live = state.keys[0, :, : len(loop.held)]
        for head in range(heads):
            ours = sorted(map(tuple, live[head].tolist()))
            assert ours == sorted(map(tuple, np.float32(loop.keys[head][loop.held]).tolist()))


def slow_cam(prompt, head, budget, recent, spread, draws):
    """Keys and values of the kept entries; an evicted value goes on in the next `spread`."""
    _, keys, values = prompt.of(head)
    scores = slow.received(prompt, head, 0)
    kept = slow.heavy(scores, budget, recent)
    merged = {t: values[t].copy() for t in kept}
    for t in range(prompt.tokens):
        if t in kept:
            continue
        later = [k for k in kept if k > t]
        takers = later[:spread] if len(later) >= spread else kept[-spread:]
        chance = scores[t] / (sum(scores[k] for k in takers) / len(takers))
        if draws[t] < min(chance, 1.0):
            for k in takers:
                merged[k] += values[t] / len(takers)
    return kept, keys[kept], np.array([merged[t] for t in kept])


@SEEDS
@SHAPES
@pytest.mark.parametrize(("spread", "recent"), [(1, 0.5), (3, 0.5), (8, 0.25), (20, 1.0)])
def test_cam_shares_evicted_values_among_those_that_follow(seed, heads, groups, spread, recent):
    prompt = slow.Prompt(seed, heads=heads, groups=groups, sharp=1.0)
    method = CaM(budget=12, recent=recent, spread=spread, seed=seed)
    draws = torch.Generator().manual_seed(seed + 2)
    draws = torch.rand(1, heads, prompt.tokens, generator=draws)[0].tolist()
    state = compress(method, prompt, layer=2, layers=3)
    for head, (at, keys, values) in enumerate(held(state, prompt)):
        kept, own, merged = slow_cam(prompt, head, 12, recent, spread, draws[head])
        assert at == kept
        np.testing.assert_array_equal(keys, own)
        np.testing.assert_allclose(values, merged, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_cam_merges_all_where_the_chance_is_one(seed):
    """Queries of zero pay the same to all: early tokens, seen by more queries, get more."""
    prompt = slow.Prompt(0, heads=1)
    prompt.queries = torch.zeros_like(prompt.queries)
    state = compress(CaM(budget=10, recent=1.0, spread=2, seed=seed), prompt)
    ((at, _, values),) = held(state, prompt)
    own = np.float64(prompt.values[0])
    assert at == list(range(40, 50))
    np.testing.assert_allclose(values[2:], own[42:], atol=1e-6)
    np.testing.assert_allclose(values[:2], own[40:42] + own[:40].sum(0) / 2, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_cam_merges_nothing_where_the_chance_is_zero(seed):
    """All attention goes to the first token, which stays."""
    prompt = slow.Prompt(0, heads=1)
    prompt.queries[..., 0] = 100.0
    prompt.keys[:, :, 0] = -100.0
    prompt.keys[:, 0, 0] = 100.0
    state = compress(CaM(budget=10, recent=0.5, spread=2, seed=seed), prompt)
    check_kept(state, prompt, [[0, 1, 2, 3, 4, 45, 46, 47, 48, 49]])


def slow_d2o(prompt, head, budget, recent):
    _, keys, values = prompt.of(head)
    kept = slow.heavy(slow.received(prompt, head, 0), budget, recent)
    evicted = [t for t in range(prompt.tokens) if t not in kept]

    def cosine(a, b):
        return (keys[a] @ keys[b]) / math.sqrt((keys[a] @ keys[a]) * (keys[b] @ keys[b]))

    match = {t: max(kept, key=lambda k: cosine(t, k)) for t in evicted}
    threshold = sum(cosine(t, match[t]) for t in evicted) / len(evicted)
    out = []
    for k in kept:
        joins = [t for t in evicted if match[t] == k and cosine(t, k) >= threshold]
        weights = [math.e, *(math.exp(cosine(t, k)) for t in joins)]
        out.append(
            [
                sum(w * x[t] for w, t in zip(weights, [k, *joins], strict=True)) / sum(weights)
                for x in (keys, values)
            ]
        )
    return kept, np.array([k for k, _ in out]), np.array([v for _, v in out])


@SEEDS
@SHAPES
@pytest.mark.parametrize("recent", [0.25, 0.5, 1.0])
def test_d2o_averages_similar_entries_and_drops_the_others(seed, heads, groups, recent):
    prompt = slow.Prompt(seed, heads=heads, groups=groups)
    state = compress(D2O(budget=12, recent=recent), prompt)
    for head, (at, keys, values) in enumerate(held(state, prompt)):
        kept, merged_keys, merged_values = slow_d2o(prompt, head, 12, recent)
        assert at == kept
        np.testing.assert_allclose(keys, merged_keys, atol=1e-5)
        np.testing.assert_allclose(values, merged_values, atol=1e-5)


@SEEDS
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_d2o_compares_with_every_kept_entry(seed, count):
    keys = torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(seed))
    kept = torch.arange(300).view(2, 150)[None, :, -count:].contiguous()
    cosine, nearest = best_match(keys, kept)
    for head in range(2):
        own = np.float64(keys[0, head])
        own /= np.linalg.norm(own, axis=-1, keepdims=True)
        cosines = own @ own[kept[0, head].numpy()].T
        np.testing.assert_allclose(cosine[0, head].numpy(), cosines.max(-1), atol=1e-6)
        np.testing.assert_array_equal(nearest[0, head].numpy(), cosines.argmax(-1))


@SEEDS
@pytest.mark.parametrize(
    "method",
    [SnapKV(budget=17, window=5), ChunkKV(budget=17, window=5), D2O(budget=17), CaM(budget=17)],
    ids=lambda m: m.name,
)
def test_a_step_attends_what_is_kept_and_what_came_since(seed, method):
    prompt = slow.Prompt(seed)
    state = compress(method, prompt)
    entries = held(state, prompt)
    draw = torch.Generator().manual_seed(seed)
    since = [([], []) for _ in prompt.heads]
    for count in (1, 3, 1):
        queries = torch.randn(1, 4, count, 4, generator=draw)
        keys = torch.randn(1, 2, count, 4, generator=draw)
        values = torch.randn(1, 2, count, 5, generator=draw)
        out = state.step(queries, keys, values, valid=None, scale=prompt.scale)
        for head, (_, own_keys, own_values) in enumerate(entries):
            for i in range(count):
                since[head][0].append(np.float64(keys[0, head, i]))
                since[head][1].append(np.float64(values[0, head, i]))
                for member in (2 * head, 2 * head + 1):
                    expected = slow.attend(
                        np.float64(queries[0, member, i]),
                        [*own_keys, *since[head][0]],
                        [*own_values, *since[head][1]],
                        prompt.scale,
                    )
                    np.testing.assert_allclose(out[0, member, i], expected, atol=1e-5)
