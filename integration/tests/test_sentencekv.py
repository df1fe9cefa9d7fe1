"""SentenceKV: what it stores, which sentences come back and when, what moves or is taken back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import recorded
import slow
import torch
from cases import close
from families import build, generate, shared
from families import prompt as words
from hypothesis import given
from hypothesis import strategies as st
from slow_retrieval import SlowSentenceKV
from test_baselines import SHAPES
from transformers import DynamicCache

from kv_integration import SentenceKV, attach
from kv_integration.method import Context, Row
from kv_integration.methods.sentencekv import SentenceRow, SentenceState
from kv_integration.sentences import SentencePlan, punkt_sentences
from kv_segment import DELIMITERS_SENTENCE, by_punctuation


class Conversation:
    """SentenceKV's step with hand-made keys: KV head dimension 4, one KV head, two query heads.

    Sentence s of the prompt has the keys `e_s`, so a query `x e_s` likes sentence s best. In each
    the most important token stands first. Of the words 0 .. 9, 8 and 9 end sentences.
    """

    def __init__(self, lengths, *, retrieved, **options):
        self.table = torch.tensor([False] * 8 + [True, True])
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        keys = torch.eye(4)[ids][None, None]
        self.plan = SentencePlan([offsets], self.table, 1)
        row = SentenceRow(
            means=torch.eye(4)[None, None, : len(lengths)],
            offsets=offsets[None],
            kept=None,
            keys=keys,
            values=keys,
            window=(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)),
            retrieved=retrieved,
            sentences=offsets,
        )
        self.state = SentenceState([row], self.plan, SentenceKV(budget=8, **options))

    def step(self, *queries, token=0, tokens=None):
        """New tokens, each with its query in both heads; the sentences' tokens that one attends."""
        count = len(queries)
        self.plan.advance(torch.tensor([tokens or [token] * count]), None)
        given = torch.tensor(queries, dtype=torch.float32).expand(1, 2, count, 4)
        new = torch.zeros(1, 1, count, 4)
        self.state.step(given, new, new, valid=None, scale=0.5)
        return self.attended

    @property
    def attended(self):
        if self.state.selected is None:  # after several tokens, which attend all
            return None
        return [i for i in self.state.selected[0, 0].tolist() if i >= 0]

    def crop(self, tokens):
        self.state.crop(tokens)
        self.plan.crop(tokens)


def test_sentences_come_back_in_falling_order_and_the_last_is_cut_by_importance():
    talk = Conversation([3, 2, 4], retrieved=5)
    assert talk.step([0, 2, 1, 0]) == [3, 4, 5, 6, 7]
    talk = Conversation([3, 2, 4], retrieved=4)
    assert talk.step([3, 0, 1, 0]) == [0, 1, 2, 5]
    talk = Conversation([3, 2, 4], retrieved=2)
    assert talk.step([0, 0, 1, 0]) == [5, 6]


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
        assert talk.step([0, 1, 0, 0]) == [2, 3]
    assert talk.step([499, 0, 0, 0]) == [2, 3]
    assert talk.state.exact.count == 1 + 501
    assert talk.plan.count.item() == 501
    assert talk.step([2, 0, 0, 0]) == [0, 1]  # 501 against 500, of 502 tokens
    assert talk.step([0, 9, 0, 0], token=8) == [2, 3]
    assert talk.step([1, 0, 0, 0]) == [0, 1]


def test_by_sentence_retrieves_at_the_first_token_and_at_sentence_ends():
    talk = Conversation([2, 2, 2], retrieved=2, retrieve="sentence")
    assert talk.step([1, 0, 0, 0]) == [0, 1]
    assert talk.step([0, 9, 0, 0]) == [0, 1]
    assert talk.step([0, 9, 0, 0], token=8) == [2, 3]
    assert talk.step([0, 0, 9, 0]) == [2, 3]


def test_a_turn_attends_all_and_its_last_sentence_goes_on_in_the_answer():
    a, b, c = [9, 0, 0, 0], [0, 2, 0, 0], [0, 0, 1, 0]
    talk = Conversation([2, 2, 2], retrieved=2)
    assert talk.step(a, b, c, tokens=[8, 0, 0]) is None  # the first sentence is over
    assert talk.state.traffic() == {"bytes_moved": 6 * 8 * 4, "hits": 0, "misses": 0}
    assert talk.step(c) == [2, 3]  # and the second goes on: 2 against 1 + 1, the earlier first
    assert talk.step(c) == [4, 5]
    talk = Conversation([2, 2, 2], retrieved=2)
    talk.step(a)
    assert talk.step(b, b, tokens=[0, 8]) is None
    assert talk.step([0, 0, 0, 1], token=8) == [0, 1]  # the turn went on with the sentence
    assert talk.step(c) == [4, 5]


def test_the_answer_to_a_turn_begins_with_sentences_of_its_own():
    talk = Conversation([2, 2, 2], retrieved=2, retrieve="sentence")
    assert talk.step([1, 0, 0, 0]) == [0, 1]
    talk.step([0, 1, 0, 0], [0, 1, 0, 0], tokens=[8, 0])
    assert talk.step([0, 2, 0, 0]) == [2, 3]
    assert talk.step([0, 0, 9, 0]) == [2, 3]


def test_only_what_changed_moves():
    talk, entry = Conversation([2, 2, 2], retrieved=4), 8 * 4
    talk.step([2, 1, 0, 0])
    assert talk.state.traffic() == {"bytes_moved": 4 * entry, "hits": 0, "misses": 4}
    talk.step([2, 1, 0, 0])
    assert talk.state.traffic() == {"bytes_moved": 4 * entry, "hits": 4, "misses": 4}
    talk.step([-30, 0, 9, 0])
    assert talk.state.traffic() == {"bytes_moved": 6 * entry, "hits": 6, "misses": 6}


tokens = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 8, 9])), max_size=6)


@given(tokens, st.lists(tokens.filter(len), max_size=4), st.sampled_from(["step", "sentence"]))
def test_after_tokens_were_taken_back_all_is_as_if_they_had_not_come(first, drafts, retrieve):
    """A draft is one input, and so is what is left of it."""
    talk, other = (Conversation([2, 2, 2, 2], retrieved=3, retrieve=retrieve) for _ in range(2))

    def say(talk, said):
        if said:
            queries = [(torch.eye(4)[k] * (1 + k)).tolist() for k, _ in said]
            talk.step(*queries, tokens=[word for _, word in said])

    for one in first:
        say(talk, [one])
        say(other, [one])
    for draft in drafts:
        say(talk, draft)
        talk.crop(len(draft))
    if retrieve == "step" and drafts:
        kept = drafts[-1][: len(drafts[-1]) // 2]
        say(talk, drafts[-1])
        talk.crop(len(drafts[-1]) - len(kept))
        say(other, kept)
    for last in ((1, 0), (3, 8), (2, 0)):
        say(talk, [last])
        say(other, [last])
        assert talk.attended == other.attended
        assert talk.plan.count.item() == other.plan.count.item()
        torch.testing.assert_close(talk.state.query_sum, other.state.query_sum)


def test_crop_gives_back_at_most_what_is_remembered():
    talk = Conversation([2, 2], retrieved=2)
    for _ in range(70):
        talk.step([1, 0, 0, 0])
    with pytest.raises(ValueError, match="cannot take back 65 tokens: 64 are remembered"):
        talk.state.crop(65)
    assert talk.state.exact.count == 71
    talk.state.select_rows(torch.tensor([0]))
    with pytest.raises(ValueError, match="cannot take back 1 tokens: 0 are remembered"):
        talk.state.crop(1)


def test_a_long_turn_leaves_no_more_than_what_is_remembered():
    talk = Conversation([2, 2], retrieved=2)
    assert talk.step(*[[1, 0, 0, 0]] * 500) is None
    assert talk.plan.count.item() == 500
    history = [*talk.state.history.tensors, *talk.plan.history.tensors]
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in history}
    assert sum(held.values()) <= 66 * (2 * 4 * 4 + 1 + 4) + 100
    talk.crop(64)
    assert talk.plan.count.item() == 436
    assert talk.state.query_sum[0].tolist() == [436.0, 0, 0, 0] * 2


OPTIONS = [
    {},
    {"per": "kv_head"},
    {"group": "max"},
    {"retrieve": "sentence", "keep": 3.0},
    {"per": "kv_head", "group": "max", "keep": 1.0, "pooling": "none", "kernel": 1},
    {"keep": 1.5, "window": 30, "pooling": "avg", "kernel": 3},
    {"hold": "prompt"},
    {"hold": "prompt", "per": "kv_head", "window": 2, "keep": 1.0, "retrieve": "sentence"},
]


def slow_options(budget, *, window=6, keep=2.0, retrieve="step", hold="kept", per="layer",
                 group="mean", pooling="max", kernel=7):  # fmt: skip
    return {
        "budget": budget, "window": window, "keep": keep, "retrieve": retrieve, "hold": hold,
        "per": per, "group": group, "mode": pooling, "kernel": kernel,
    }  # fmt: skip


@SHAPES
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_whole_of_it_by_loops(tokenizer, seed, heads, groups, options):
    """What is stored, which tokens each step attends and what comes out, over three sentences."""
    prompt = slow.Prompt(seed, tokens=60, heads=heads, groups=groups)
    ids = words(60, seed=seed)["input_ids"][0]
    table = Context(tokenizer).delimiters(DELIMITERS_SENTENCE)
    method = SentenceKV(budget=15, **{"window": 6} | options)
    plan = method.begin([ids], Context(tokenizer))
    row = Row(
        0, prompt.queries[None, :, -method.window :], prompt.keys[None], prompt.values[None], 0.4
    )
    state = method.compress([row], plan)
    loop = SlowSentenceKV(prompt, table[ids].tolist(), **slow_options(15, **options))
    draw = torch.Generator().manual_seed(seed)
    full_stop, word = int(table.nonzero()[0][0]), 2
    said = [[word], [word], [full_stop], [full_stop], [word, full_stop, word], [word], [word],
            [word, word], [full_stop, full_stop, word], [word], [full_stop], [word]]  # fmt: skip
    for ids in said:
        queries, keys, values = (
            torch.randn(len(ids), n, d, generator=draw)
            for n, d in ((heads * groups, 4), (heads, 4), (heads, 5))
        )
        plan.advance(torch.tensor([ids]), None)
        out = state.step(
            *(x.transpose(0, 1)[None] for x in (queries, keys, values)), valid=None, scale=0.4
        )[0].transpose(0, 1)
        exact = [np.float64(x) for x in (queries, keys, values)]
        ends = table[ids].tolist()
        if len(ids) > 1:
            np.testing.assert_allclose(out, loop.turn(*exact, ends=ends), atol=1e-5)
            continue
        chosen, expected = loop.step(*(x[0] for x in exact), ends=ends[0])
        np.testing.assert_allclose(out[0], expected, atol=1e-5)
        assert attended_of(state, prompt.keys) == chosen


def attended_of(state, keys):
    """Positions in the prompt of the stored tokens that each head attends."""
    rows = state.stored.store.gather(state.selected)[0][..., : keys.shape[-1]]
    return [
        sorted((own[None] == row[:, None]).all(-1).int().argmax(-1).tolist())
        for own, row in zip(keys, rows, strict=True)
    ]


@pytest.mark.parametrize("options", [{}, {"per": "kv_head", "group": "max"}], ids=str)
def test_a_real_prompt_by_loops(options):
    """The embedded model: the same sentences in every layer and step, and the same outputs."""
    method = SentenceKV(budget=0.15, window=16, **options)
    cache, tokens, layers = recorded.run(method, context=300, steps=6)
    _, tokenizer = recorded.embedded()
    table = Context(tokenizer).delimiters(DELIMITERS_SENTENCE)
    for number, (prompt, steps) in enumerate(layers):
        budget = int(0.15 * prompt.tokens)
        delimiter = table[tokens[: prompt.tokens]].tolist()
        loop = SlowSentenceKV(prompt, delimiter, **slow_options(budget, window=16, **options))
        for token, (queries, keys, values, out) in zip(
            tokens[prompt.tokens :], steps, strict=False
        ):
            chosen, expected = loop.step(queries, keys, values, ends=bool(table[token]))
            np.testing.assert_allclose(out, expected, atol=2e-5)
        assert attended_of(cache.compressed[number].state, prompt.keys) == chosen


def test_sentencekv_holds_its_tokens_on_the_host_and_moves_only_what_changed(tokenizer):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SentenceKV(budget=24, window=6, keep=3.0))
        generate(model, words(400), cache, new=12)
        report = cache.report()
    token = 2 * 2 * 16 * 4
    assert report.entries_attended == 24
    assert report.host_bytes == pytest.approx(3 * 54 * token, rel=0.02)
    assert report.layers[0].hits + report.layers[0].misses == 11 * 18 * 2
    assert report.bytes_moved == sum(layer.misses for layer in report.layers) * token // 2
    assert 0 < report.hit_rate < 1


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_tier_changes_where_bytes_lie_and_nothing_else(tokenizer, tier):
    model = build("llama")
    with attach(model, tokenizer) as kv:
        expected = generate(model, words(90), kv.cache(SentenceKV(budget=24, window=8)))[1]
        cache = kv.cache(SentenceKV(budget=24, window=8, tier=tier))
        assert torch.equal(generate(model, words(90), cache)[1], expected)
        report = cache.report()
    tiers = {"host": report.host_bytes, "disk": report.disk_bytes}
    assert tiers.pop(tier) > 0
    assert list(tiers.values()) == [0]


def test_punkt_knows_abbreviations_and_punctuation_does_not():
    _, tokenizer = recorded.embedded()
    text = "We met Dr. Smith at 5 p.m. on Monday. He said hello! Then the U.S. team won it all."
    ids = torch.tensor(tokenizer(text)["input_ids"])
    context = Context(tokenizer)

    def cut(offsets):
        return [tokenizer.decode(ids[a:b]).strip() for a, b in pairwise(offsets)]

    assert cut(punkt_sentences(ids, context).tolist()) == [
        "We met Dr. Smith at 5 p.m. on Monday.",
        "He said hello!",
        "Then the U.S. team won it all.",
    ]
    table = context.delimiters(DELIMITERS_SENTENCE)
    assert len(by_punctuation(ids.numpy(), table)) - 1 != 3


def test_punkt_works_on_any_model_with_a_tokenizer_and_says_what_it_needs(tokenizer):
    model, inputs = shared("llama"), words(60, 25)
    expected = generate(model, inputs, DynamicCache(config=model.config))[1]
    with attach(model, tokenizer) as kv:
        close(
            generate(model, inputs, kv.cache(SentenceKV(budget=1.0, sentences="punkt")))[1],
            expected,
        )
        cache = kv.cache(SentenceKV(budget=12, window=4, sentences="punkt"))
        generate(model, inputs, cache)
        assert cache.report().entries_attended == 12
    with attach(model) as kv, pytest.raises(ValueError, match="needs the tokenizer"):
        generate(model, inputs, kv.cache(SentenceKV(sentences="punkt")))
    with pytest.raises(ValueError, match="sentences='punkt' reads the text"):
        punkt_sentences(inputs["input_ids"][0], Context(None))
