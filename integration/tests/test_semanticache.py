"""SemantiCache against plain loops: clusters, means, log sizes, and attention over them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import slow
import torch
from families import generate, shared
from families import prompt as words
from test_baselines import SEEDS, SHAPES, compress

from kv_integration import FullKV, SemantiCache, attach


def similar_keys(seed, **shape):
    """A prompt whose keys repeat four directions, so that clusters of all sizes appear."""
    prompt = slow.Prompt(seed, **shape)
    draw = torch.Generator().manual_seed(seed)
    heads, tokens, dim = prompt.keys.shape
    ways = torch.randn(heads, 4, dim, generator=draw)
    which = torch.randint(0, 4, (heads, tokens), generator=draw)
    chosen = ways.gather(1, which[..., None].expand(-1, -1, dim))
    prompt.keys = chosen + 0.5 * prompt.keys
    return prompt


def chunks_of(method, delimiter):
    tokens = list(range(len(delimiter)))
    if method.chunks == "none":
        return [tokens]
    if method.chunks == "fixed":
        size = method.chunk_size
        return [tokens[a : a + size] for a in range(0, len(tokens), size)]
    return slow.chunks_between(delimiter)


def slow_theta(method, keys, chunks, tokens):
    """theta as given, or the largest that twelve bisections find within the budget."""
    if method.theta is not None:
        return method.theta
    budget = method.budget
    if isinstance(budget, float):
        budget = math.floor(budget * tokens)
    if budget >= tokens:
        return 1.0
    low, high = -1.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        if len(slow.clusters(keys, chunks, middle)) <= budget:
            low = middle
        else:
            high = middle
    return low


METHODS = [
    SemantiCache(theta=0.9),
    SemantiCache(theta=0.5),
    SemantiCache(theta=0.0),
    SemantiCache(theta=-1.0),
    SemantiCache(theta=1.0),
    SemantiCache(theta=0.5, proportional=False),
    SemantiCache(theta=0.6, chunks="fixed", chunk_size=7),
    SemantiCache(theta=0.6, chunks="none"),
    SemantiCache(budget=30),
    SemantiCache(budget=0.6),
    SemantiCache(budget=10, chunks="none"),
    SemantiCache(budget=3, chunks="fixed", chunk_size=16),  # less than one entry per chunk
]


@SEEDS
@SHAPES
@pytest.mark.parametrize("method", METHODS, ids=lambda m: str(m)[len("SemantiCache") :])
def test_clusters_means_sizes_and_attention(tokenizer, seed, heads, groups, method):
    prompt = similar_keys(seed, tokens=48, heads=heads, groups=groups)
    ids = words(48, seed=seed)["input_ids"][0]
    chunks = chunks_of(method, [i % 8 == 0 for i in ids.tolist()])
    state = compress(method, prompt, ids=ids, tokenizer=tokenizer)
    held = state.recall(0, 48)
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(1, heads * groups, 1, 4, generator=draw)
    key, value = (torch.randn(1, heads, 1, d, generator=draw) for d in (4, 5))
    out = state.step(queries, key, value, valid=None, scale=prompt.scale)
    for head in prompt.heads:
        _, keys, values = prompt.of(head)
        theta = slow_theta(method, keys, chunks, 48)
        clusters = sorted(slow.clusters(keys, chunks, theta))
        here = held.positions[0, head] >= 0
        assert held.positions[0, head][here].tolist() == [c[0] for c in clusters]
        assert int(state.entries()[0, head]) == len(clusters)
        means = [np.array([x[c].mean(0) for c in clusters]) for x in (keys, values)]
        np.testing.assert_allclose(held.keys[0, head, here], means[0], atol=1e-5)
        np.testing.assert_allclose(held.values[0, head, here], means[1], atol=1e-5)
        sizes = [math.log(len(c)) if method.proportional else 0.0 for c in clusters]
        if method.proportional:
            np.testing.assert_allclose(held.log_size[0, head, here], sizes, atol=1e-6)
        else:
            assert held.log_size is None
        for member in range(head * groups, (head + 1) * groups):
            expected = slow.attend(
                np.float64(queries[0, member, 0]),
                [*means[0], np.float64(key[0, head, 0])],
                [*means[1], np.float64(value[0, head, 0])],
                prompt.scale,
                [*sizes, 0.0],
            )
            np.testing.assert_allclose(out[0, member, 0], expected, atol=1e-5)


@SEEDS
def test_a_budget_is_met_or_the_report_says_so(tokenizer, seed):
    model, inputs = shared("llama"), words(200, seed=seed)
    chunks = len(slow.chunks_between([i % 8 == 0 for i in inputs["input_ids"][0].tolist()]))
    with attach(model, tokenizer) as kv:
        for budget in (1, chunks - 1, chunks, 100, 199, 200, 300):
            cache = kv.cache(SemantiCache(budget=budget))
            generate(model, inputs, cache, new=2)
            report = cache.report()
            assert report.budget_entries == min(budget, 200)
            if budget < chunks:
                assert report.entries_attended == chunks  # one for each, delimiters among them
            else:
                assert 0.5 * min(budget, 200) < report.entries_attended <= budget


def test_entries_that_stand_for_equal_keys_change_nothing(tokenizer):
    """Equal keys and values: a cluster weighs as much as its members did."""
    prompt = slow.Prompt(0, tokens=24)
    prompt.keys, prompt.values = (
        x[:, ::4].repeat_interleave(4, 1) for x in (prompt.keys, prompt.values)
    )
    merged = compress(SemantiCache(theta=0.999, chunks="none"), prompt)
    whole = compress(SemantiCache(theta=1.0, chunks="none"), prompt)
    assert merged.entries().tolist() == [[6, 6]] and whole.entries().tolist() == [[24, 24]]
    new = (torch.randn(1, h, 1, d) for h, d in ((4, 4), (2, 4), (2, 5)))
    new = list(new)
    outs = [state.step(*new, valid=None, scale=0.4) for state in (merged, whole)]
    torch.testing.assert_close(*outs)


@SEEDS
def test_compressed_again_a_cluster_counts_all_its_tokens(tokenizer, seed):
    """Two rounds by loops: means of means, weighted, and sizes that add up."""
    method, first, second = SemantiCache(theta=0.5, chunks="none"), 30, 12
    prompt = similar_keys(seed, tokens=first + second, heads=1)
    head = slow.Prompt(seed, tokens=first, heads=1)
    head.keys, head.values = prompt.keys[:, :first], prompt.values[:, :first]
    state = compress(method, head)
    later = prompt.keys[None, :, first:], prompt.values[None, :, first:]
    state.step(prompt.queries[None, :, first:], *later, valid=None, scale=0.4)
    held = state.recall(0, first + second)
    again = compress_rows(method, prompt, held)
    _, keys, values = prompt.of(0)
    once = slow.clusters(keys, [list(range(first))], 0.5)
    groups = sorted(once) + [[t] for t in range(first, first + second)]
    means = np.array([keys[g].mean(0) for g in groups])
    twice = sorted(slow.clusters(means, [list(range(len(groups)))], 0.5))
    expected = [[t for i in cluster for t in groups[i]] for cluster in twice]
    found = again.recall(0, first + second)
    assert found.positions[0, 0].tolist() == [groups[c[0]][0] for c in twice]
    np.testing.assert_allclose(found.keys[0, 0], [keys[g].mean(0) for g in expected], atol=1e-5)
    np.testing.assert_allclose(found.values[0, 0], [values[g].mean(0) for g in expected], atol=1e-5)
    np.testing.assert_allclose(found.log_size[0, 0].exp(), [len(g) for g in expected], rtol=1e-5)


def compress_rows(method, prompt, held):
    from kv_integration.method import Plan, Row

    plan = Plan()
    plan.settle(recompress=True)
    row = Row(
        0, prompt.queries[None, :, -1:], held.keys, held.values, 0.4,
        seen=prompt.tokens, positions=held.positions, log_size=held.log_size,
    )  # fmt: skip
    return method.compress([row], plan)


@pytest.mark.parametrize("chunks", ["fixed", "none"])
def test_chunks_without_delimiters_need_no_tokenizer(chunks):
    model = shared("llama")
    with attach(model) as kv:
        lossless = kv.cache(SemantiCache(theta=1.0, chunks=chunks))
        expected = generate(model, words(30), kv.cache(FullKV()))[1]
        torch.testing.assert_close(
            generate(model, words(30), lossless)[1], expected, atol=5e-5, rtol=2e-4
        )
