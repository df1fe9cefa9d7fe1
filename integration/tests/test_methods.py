"""Budgets, buffers, SABlock under a model, and a method of a user's own."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from families import build, generate, prompt
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from kv_integration import METHODS, Eviction, SABlock, attach
from kv_integration.budget import budget_entries, split_window
from kv_integration.buffer import KVBuffer


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
