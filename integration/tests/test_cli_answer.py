"""`run_method`: texts, figures and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_model import make_model, make_tokenizer

from kv_integration import FullKV, SABlock, SentenceKV, answer, haystack
from kv_integration.answer import Clock, decode_answer, end_tokens, is_correct, run_method

TOKENIZER = make_tokenizer()
MODEL = make_model(len(TOKENIZER))
PROMPT = haystack.needle_prompt(TOKENIZER, context=300, depth=0.5).ids
METHODS = [None, FullKV(), SABlock(budget=40), SentenceKV(budget=40)]


@contextmanager
def ending_with(token: int) -> Iterator[None]:
    before = MODEL.generation_config.eos_token_id
    MODEL.generation_config.eos_token_id = token
    try:
        yield
    finally:
        MODEL.generation_config.eos_token_id = before


def greedy(count: int) -> list[int]:
    """Token by token without any cache."""
    ids = list(PROMPT)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(MODEL(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("method", METHODS[:2])
def test_the_answer_is_greedy_and_ends_where_the_model_ends(method) -> None:
    tokens = greedy(6)
    assert run_method(MODEL, TOKENIZER, PROMPT, method, max_new_tokens=6).answer == (
        TOKENIZER.decode(tokens).strip()
    )
    end = tokens[3]
    with ending_with(end):
        seen: list[int] = []
        found = run_method(
            MODEL,
            TOKENIZER,
            PROMPT,
            method,
            max_new_tokens=6,
            on_token=lambda: seen.append(1),
        )
    assert found.answer == TOKENIZER.decode(tokens[: tokens.index(end)]).strip()
    assert len(seen) == 6  # all are generated, so that there are enough to time


def test_sampling_in_the_generation_config_is_ignored() -> None:
    expected = run_method(MODEL, TOKENIZER, PROMPT, None, max_new_tokens=6).answer
    config = MODEL.generation_config
    before = (config.do_sample, config.temperature, config.repetition_penalty)
    config.do_sample, config.temperature, config.repetition_penalty = True, 5.0, 3.0
    try:
        assert run_method(MODEL, TOKENIZER, PROMPT, None, max_new_tokens=6).answer == expected
    finally:
        config.do_sample, config.temperature, config.repetition_penalty = before


@pytest.mark.parametrize("method", METHODS)
def test_figures(method) -> None:
    found = run_method(MODEL, TOKENIZER, PROMPT, method, max_new_tokens=5)
    token = sum(
        2 * layer.self_attn.k_proj.weight.shape[0] * 4 for layer in MODEL.get_decoder().layers
    )
    assert found.full_kv_bytes == token * (len(PROMPT) + 4)
    assert found.prompt_tokens == len(PROMPT)
    assert found.disk_bytes == 0 and found.device_bytes > 0
    assert found.entries_attended == (40 if found.budget == 40 else len(PROMPT))
    assert found.ttft_s > 0 and found.per_token_s is not None and found.per_token_s > 0


def test_the_model_is_as_before() -> None:
    attention = MODEL.config._attn_implementation
    logits = MODEL(torch.tensor([PROMPT])).logits
    run_method(MODEL, TOKENIZER, PROMPT, SABlock(budget=40), max_new_tokens=2)
    assert MODEL.config._attn_implementation == attention
    assert torch.equal(MODEL(torch.tensor([PROMPT])).logits, logits)


def test_errors() -> None:
    with pytest.raises(ValueError, match="ids must hold at least one token"):
        run_method(MODEL, TOKENIZER, [], None)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        run_method(MODEL, TOKENIZER, PROMPT, None, max_new_tokens=0)


def test_the_clock_leaves_the_prompt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 13.0, 14.0, 16.0, 21.0])
    monkeypatch.setattr(answer.time, "perf_counter", lambda: next(ticks))
    clock = Clock(None)
    for value in ([[1, 2, 3]], [4], [5], [6], [7]):
        clock.put(torch.tensor(value))
    clock.end()
    assert clock.first == 3.0
    assert clock.later == 2.0  # of 1, 2 and 5


@given(number=st.integers(0, 10**6 - 1), before=st.text("abc .:", max_size=9))
def test_right_is_the_first_number(number: int, before: str) -> None:
    expected = f"{number:06d}"
    assert is_correct(f"{before}{expected}.", expected)
    assert is_correct(f"{before}{expected}, not 5", expected)
    assert not is_correct(f"{before}5, not {expected}", expected)
    assert not is_correct(f"{before}{expected}1", expected)
    assert not is_correct(before, expected)


def test_end_tokens_of_model_and_tokenizer() -> None:
    assert end_tokens(MODEL, TOKENIZER) == {0}
    with ending_with([5, 6]):  # type: ignore[arg-type]
        assert end_tokens(MODEL, TOKENIZER) == {0, 5, 6}
    tokens = TOKENIZER("one two")["input_ids"]
    assert decode_answer(TOKENIZER, [*tokens, 0, *tokens], {0}) == "one two"
