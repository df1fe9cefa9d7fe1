"""SABlock and SentenceKV: what they keep, retrieve, hold and count."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from families import build, generate, prompt
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from kv_integration import METHODS, Eviction, SABlock, SentenceKV, attach
from kv_integration.budget import budget_entries, split_window
from kv_integration.buffer import KVBuffer
from kv_integration.methods.sentencekv import SentencePlan, SentenceRow, SentenceState


@given(st.integers(1, 5000), st.one_of(st.integers(1, 6000), st.floats(1e-4, 1.0)))
def test_a_budget_never_exceeds_the_prompt_nor_what_was_granted(tokens, budget):
    entries = budget_entries(budget, tokens)
    assert 1 <= entries <= tokens
    granted = budget if isinstance(budget, int) else budget * tokens
    assert entries <= max(granted, 1)
    assert entries > min(granted, tokens) - 1


@given(st.integers(1, 500), st.integers(1, 200))
def test_the_window_never_takes_more_than_a_quarter_of_a_budget(budget, window):
    kept, selected = split_window(budget, window)
    assert kept + selected == budget
    assert 1 <= kept <= window
    assert kept == window or kept == max(budget // 4, 1)


class Remembering(SABlock):
    """SABlock that also tells a list outside which tokens it kept."""

    kept: list[torch.Tensor]

    def keep(self, row, plan):
        indices = super().keep(row, plan)
        self.kept.append(indices)
        return indices


@pytest.mark.parametrize("budget", [6, 12, 30])
def test_sablock_equals_attention_masked_to_the_tokens_it_kept(tokenizer, budget):
    model = build("llama")
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    inputs = prompt(60)
    method = Remembering(budget=budget, window=4)
    object.__setattr__(method, "kept", [])
    with attach(model, tokenizer) as kv:
        cache = kv.cache(method)
        tokens, logits = generate(model, inputs, cache)
    (kept,) = method.kept
    assert kept.shape[-1] == budget == cache.report().entries_attended
    assert kept[0, 0].tolist() == sorted(set(kept[0, 0].tolist()))
    assert kept[0, 0, -min(4, budget // 4) :].tolist() == list(range(60 - min(4, budget // 4), 60))
    seen = torch.zeros(60 + 6, dtype=torch.bool)
    seen[kept[0, 0]] = True
    reference = DynamicCache(config=model.config)
    with torch.no_grad():
        out = model(**inputs, past_key_values=reference).logits[:, -1:]
        for step in range(6):
            torch.testing.assert_close(out[:, -1], logits[step], atol=2e-5, rtol=1e-4)
            seen[60 + step] = True
            mask = seen[: 61 + step].view(1, 1, 1, -1)
            new = tokens[:, 60 + step : 61 + step]
            position = torch.tensor([[60 + step]])
            out = model(
                new, attention_mask=mask, position_ids=position, past_key_values=reference
            ).logits


def test_sentencekv_holds_its_tokens_on_the_host_and_moves_only_what_changed(tokenizer):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SentenceKV(budget=24, window=6, keep=3.0))
        generate(model, prompt(400), cache, new=12)
        report = cache.report()
    token = 2 * 2 * 16 * 4
    assert report.entries_attended == 24
    assert report.host_bytes == pytest.approx(3 * 54 * token, rel=0.02)
    assert report.layers[0].hits + report.layers[0].misses == 11 * 18 * 2
    assert report.bytes_moved == sum(layer.misses for layer in report.layers) * token // 2
    assert 0 < report.hit_rate < 1


class Conversation:
    """SentenceKV's step with hand-made keys: KV head dimension 4, one KV head, two query heads.

    Sentence s of the prompt has the keys `e_s`, so a query `x e_s` likes sentence s best.
    """

    def __init__(self, lengths, *, retrieved, retrieve="step"):
        self.table = torch.tensor([False] * 8 + [True, True])
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        keys = torch.eye(4)[ids][None, None]
        alpha = torch.arange(len(ids), dtype=torch.float32)[None, None]
        self.plan = SentencePlan([offsets], self.table, 1)
        row = SentenceRow(
            means=torch.eye(4)[None, None, : len(lengths)],
            offsets=offsets,
            alpha=alpha,
            entries=torch.cat([keys, keys], -1),
            window=(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)),
            retrieved=retrieved,
        )
        self.state = SentenceState([row], self.plan, SentenceKV(budget=8, retrieve=retrieve))

    def step(self, query, token=0):
        """One generated token with this query in both heads; the stored tokens it attends."""
        self.plan.advance(torch.tensor([[token]]), None)
        queries = torch.tensor(query, dtype=torch.float32).expand(1, 2, 1, 4)
        new = torch.zeros(1, 1, 1, 4)
        self.state.step(queries, new, new, valid=None, scale=0.5)
        return [i for i in self.state.selected[0, 0].tolist() if i >= 0]


def test_sentences_come_back_in_falling_order_and_the_last_is_cut_by_importance():
    talk = Conversation([3, 2, 4], retrieved=5)
    assert talk.step([0, 2, 1, 0]) == [3, 4, 6, 7, 8]
    talk = Conversation([3, 2, 4], retrieved=4)
    assert talk.step([3, 0, 1, 0]) == [0, 1, 2, 8]
    talk = Conversation([3, 2, 4], retrieved=2)
    assert talk.step([0, 0, 1, 0]) == [7, 8]


def test_the_query_is_the_mean_over_the_sentence_and_starts_anew_after_its_end():
    talk = Conversation([2, 2, 2], retrieved=2)
    assert talk.step([9, 0, 0, 0]) == [0, 1]
    assert talk.step([0, 3, 0, 0]) == [0, 1]  # the mean still likes the first sentence best
    assert talk.step([0, 0, 1, 0], token=8) == [0, 1]  # a full stop ends the sentence
    assert talk.step([0, 0, 1, 0], token=9) == [0, 1]  # a newline after it still belongs to it
    assert talk.step([0, 0, 1, 0]) == [4, 5]


def test_a_long_sentence_is_never_forgotten():
    talk = Conversation([2, 2], retrieved=2)
    for _ in range(500):
        talk.step([0, 1, 0, 0])
    assert talk.step([100, 0, 0, 0]) == [2, 3]
    assert talk.state.exact.count == 1 + 501
    assert talk.state.query_count.item() == 501


def test_by_sentence_retrieves_at_the_first_token_and_at_sentence_ends():
    talk = Conversation([2, 2, 2], retrieved=2, retrieve="sentence")
    assert talk.step([1, 0, 0, 0]) == [0, 1]
    assert talk.step([0, 9, 0, 0]) == [0, 1]
    assert talk.step([0, 9, 0, 0], token=8) == [2, 3]
    assert talk.step([0, 0, 9, 0]) == [2, 3]


def test_only_what_changed_moves():
    talk = Conversation([2, 2, 2], retrieved=4)
    talk.step([2, 1, 0, 0])
    assert (talk.state.hits.hits, talk.state.hits.misses) == (0, 4)
    talk.step([2, 1, 0, 0])
    assert (talk.state.hits.hits, talk.state.hits.misses) == (4, 4)
    talk.step([-30, 0, 9, 0])
    assert (talk.state.hits.hits, talk.state.hits.misses) == (6, 6)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_tier_changes_where_bytes_lie_and_nothing_else(tokenizer, tier):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        expected = generate(model, prompt(90), kv.cache(SentenceKV(budget=24, window=8)))[1]
        cache = kv.cache(SentenceKV(budget=24, window=8, tier=tier))
        assert torch.equal(generate(model, prompt(90), cache)[1], expected)
        report = cache.report()
    tiers = {"host": report.host_bytes, "disk": report.disk_bytes}
    assert tiers.pop(tier) > 0
    assert list(tiers.values()) == [0]


@given(st.data())
def test_a_buffer_equals_lists(data):
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    counts = [data.draw(st.integers(1, 4)) for _ in range(batch)]
    lists = [torch.randn(heads, n, 2) for n in counts]
    buffer = KVBuffer.stack([(x[None], -x[None]) for x in lists])
    for _ in range(data.draw(st.integers(0, 4))):
        action = data.draw(st.sampled_from(["append", "ragged", "crop", "select"]))
        if action == "crop":
            count = data.draw(st.integers(0, min(x.shape[1] for x in lists)))
            buffer.crop(count)
            lists = [x[:, : x.shape[1] - count] for x in lists]
        elif action == "select":
            rows = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=3))
            buffer.select_rows(torch.tensor(rows))
            lists = [lists[row] for row in rows]
        else:
            n = data.draw(st.integers(1, 70))
            new = torch.randn(len(lists), heads, n, 2)
            valid = None
            if action == "ragged":
                left = [data.draw(st.integers(0, n)) for _ in lists]
                valid = torch.tensor([[i >= skip for i in range(n)] for skip in left])
            buffer.append(new, -new, valid)
            skips = [0] * len(lists) if valid is None else (~valid).sum(1).tolist()
            lists = [torch.cat([x, y[:, s:]], 1) for x, y, s in zip(lists, new, skips, strict=True)]
    for row, x in enumerate(lists):
        keys, values = buffer.row(row)
        assert torch.equal(keys[0], x) and torch.equal(values[0], -x)


class Latest(Eviction):
    """A user's own method in five lines: the last `budget` tokens."""

    def __init__(self, budget):
        self.budget = budget

    def keep(self, row, plan):
        count = budget_entries(self.budget, row.tokens)
        return torch.arange(row.tokens - count, row.tokens)[None, None]


def test_a_users_method_needs_no_more_than_keep(tokenizer):
    model = build("llama")
    with attach(model) as kv:
        cache = kv.cache(Latest(0.25))
        generate(model, prompt(40), cache)
    assert cache.report().entries_attended == 10


def test_every_method_is_listed_by_its_name():
    assert {name: cls().name for name, cls in METHODS.items()} == {n: n for n in METHODS}


def test_the_example_of_an_own_method_runs(capsys):
    example = Path(__file__).parents[1] / "examples" / "own_method.py"
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert "paragraphkv: " in printed
    assert "expected" in printed
