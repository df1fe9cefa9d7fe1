from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import make_tokenizer
from transformers import PreTrainedTokenizerFast

from kv_integration import haystack

PLAIN = make_tokenizer(template=False)
CHAT = make_tokenizer()
CHAT_FRAME = 2  # the template's own tokens


@given(
    context=st.integers(80, 1200),
    depth=st.floats(0, 1),
    seed=st.integers(0, 10**6),
    tokenizer=st.sampled_from([PLAIN, CHAT]),
)
@settings(max_examples=60)
def test_needle_prompt_fills_its_context_and_never_more(
    context: int, depth: float, seed: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = haystack.needle_prompt(tokenizer, context=context, depth=depth, seed=seed)
    # The text is cut between words, or inside a run of more than 20 characters.
    assert context - 40 <= len(prompt.ids) <= context
    text = tokenizer.decode(prompt.ids)
    assert prompt.expected is not None and text.count(prompt.expected) == 1
    key = text.split("The magic number for ")[1].split(" ")[0]
    assert haystack.NEEDLE.format(key=key, number=prompt.expected) in text
    assert haystack.QUESTION.format(key=key) in text
    assert haystack.is_held_out(f"{key}:{prompt.expected}", share=haystack.HELD_OUT_PAIRS)
    again = haystack.needle_prompt(tokenizer, context=context, depth=depth, seed=seed)
    assert again == prompt


@given(depth=st.floats(0, 1), seed=st.integers(0, 10**6))
@settings(max_examples=30)
def test_needle_lies_where_it_should(depth: float, seed: int) -> None:
    text = "One fact about nothing at all. " * 400
    prompt = haystack.needle_prompt(PLAIN, context=2000, depth=depth, seed=seed, text=text)
    document = PLAIN.decode(prompt.ids).split("\n\nQuestion: ")[0]
    place = document.index("The magic number") / len(document)
    assert abs(place - depth) < 0.03


def test_text_starts_and_pairs_depend_on_the_seed() -> None:
    prompts = [haystack.needle_prompt(CHAT, context=300, depth=0.5, seed=n) for n in range(20)]
    assert len({prompt.expected for prompt in prompts}) == 20
    assert len({tuple(prompt.ids[1:9]) for prompt in prompts}) > 10


def test_mean_room_left_is_small() -> None:
    left = [
        1000 - len(haystack.needle_prompt(CHAT, context=1000, depth=0.3, seed=n).ids)
        for n in range(30)
    ]
    assert min(left) >= 0 and sum(left) / len(left) < 4


def test_short_text_is_repeated() -> None:
    prompt = haystack.needle_prompt(PLAIN, context=500, depth=0.5, text="Rain fell. ", source="x")
    assert 490 <= len(prompt.ids) <= 500
    assert PLAIN.decode(prompt.ids).count("Rain fell.") > 20


def test_prose_of_a_prompt_is_of_the_held_out_topics_alone() -> None:
    prompt = haystack.needle_prompt(PLAIN, context=700, depth=0.0, seed=3)
    document = PLAIN.decode(prompt.ids).split("\n\nQuestion: ")[0]
    after = document[len(document) // 2 :][:200]  # behind the needle
    assert after in "\n\n".join(haystack.topics(held_out=True))
    assert after not in "\n\n".join(haystack.topics(held_out=False))


@given(text=st.text(st.sampled_from("ab \n."), min_size=1, max_size=60), chars=st.integers(0, 300))
def test_cut_at_word(text: str, chars: int) -> None:
    whole = text * 301
    part = haystack.cut_at_word(text, chars)
    assert len(part) <= chars and whole.startswith(part)
    assert chars - len(part) <= haystack.LONGEST_WORD
    spaces = [n for n in range(chars + 1) if whole[n].isspace() or n == 0]
    assert len(part) in (spaces[-1], chars)
    if len(part) == chars != spaces[-1]:
        assert chars - spaces[-1] > haystack.LONGEST_WORD


@given(
    context=st.integers(0, 500),
    empty=st.integers(0, 50),
    rate=st.floats(0.05, 3),
    step=st.integers(1, 9),
)
def test_fit_is_close_and_never_above(context: int, empty: int, rate: float, step: int) -> None:
    def build(chars: int) -> list[int]:
        return [0] * (empty + int(chars // step * step * rate))

    if empty > context:
        with pytest.raises(ValueError, match=f"context is {context} tokens, but .* {empty}"):
            haystack.fit(build, context)
        return
    found = len(haystack.fit(build, context))
    assert context - haystack.SLACK - step * rate - 1 <= found <= context


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: haystack.needle_prompt(PLAIN, context=5, depth=0.5), "context is 5 tokens, but"),
        (lambda: haystack.needle_prompt(PLAIN, context=500, depth=1.5), "depth must be between"),
        (
            lambda: haystack.needle_prompt(PLAIN, context=500, depth=0, text=" \n", source="F"),
            "F is empty",
        ),
        (lambda: haystack.document_prompt(PLAIN, " ", "Why?", name="F"), "F is empty"),
        (lambda: haystack.document_prompt(PLAIN, "Text.", "\n"), "the question is empty"),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_document_prompt_with_and_without_a_chat_template() -> None:
    plain = haystack.document_prompt(PLAIN, " A fact.\n", "Why?")
    assert PLAIN.decode(plain.ids) == "A fact.\n\nQuestion: Why?\nAnswer:"
    chat = haystack.document_prompt(CHAT, "A fact.\n", "Why?", name="F")
    assert CHAT.decode(chat.ids) == "<|user|>A fact.\n\nWhy?<|assistant|>"
    assert len(chat.ids) == len(CHAT("A fact.\n\nWhy?")["input_ids"]) + CHAT_FRAME
    assert chat.expected is None
    assert "F" in chat.caption and "Why?" in chat.caption


def test_keys_of_a_model_folder(tmp_path: Path) -> None:
    assert haystack.read_keys(tmp_path) == haystack.COMMON_WORDS
    (tmp_path / "keys.json").write_text('["one", "two"]')
    assert haystack.read_keys(tmp_path) == ("one", "two")
    for wrong, message in (("[1, 2]", "must hold a list of words"), ("[", "is no JSON")):
        (tmp_path / "keys.json").write_text(wrong)
        with pytest.raises(ValueError, match=message):
            haystack.read_keys(tmp_path)


def test_pairs_are_held_out_and_spread_over_the_keys() -> None:
    rng = random.Random(0)
    pairs = [haystack.draw_pair(rng, ["one", "two"]) for _ in range(100)]
    assert all(haystack.is_held_out(f"{k}:{n}", share=0.1) and len(n) == 6 for k, n in pairs)
    assert {key for key, _ in pairs} == {"one", "two"}
