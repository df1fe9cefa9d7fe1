"""Perplexity token by token through a cache, against one pass over the whole text in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_model import make_model, make_tokenizer
from tokenizers_for_tests import KINDS, tokenizer_of
from transformers import DynamicCache

from kv_bench.tasks import MissingData, ScoredText, negative_log_likelihoods, perplexity
from kv_bench.tasks.perplexity import Perplexity
from kv_integration import attach
from kv_integration.baselines import FullKV, SnapKV

VOCABULARY = 50
model = make_model(VOCABULARY)
ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)


@given(ids, ids)
def test_steps_equal_one_pass(context: list[int], continuation: list[int]) -> None:
    text = ScoredText("0", tuple(context), tuple(continuation))
    whole = torch.tensor([context + continuation])
    with torch.no_grad():
        scores = model(whole).logits[0].double().log_softmax(-1)
    wanted = -scores[torch.arange(len(context) - 1, whole.shape[1] - 1), continuation]
    found = negative_log_likelihoods(model, text, DynamicCache(config=model.config))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    with attach(model) as kv:
        cache = kv.cache(FullKV(), prompt_length=len(context))
        torch.testing.assert_close(
            negative_log_likelihoods(model, text, cache), wanted, atol=1e-5, rtol=0
        )


def test_a_method_compresses_the_context_alone() -> None:
    text = ScoredText("0", tuple(range(40)), tuple(range(10, 20)))
    seen = []
    with attach(model) as kv:
        cache = kv.cache(SnapKV(budget=8), prompt_length=40)
        losses = negative_log_likelihoods(model, text, cache, on_token=lambda: seen.append(1))
        report = cache.report()
    assert len(losses) == len(seen) == 10
    assert report.tokens_seen == 40 + 9  # the last one is only predicted
    assert report.entries_attended < 40


@pytest.mark.parametrize("losses", [[], [torch.zeros(0)], [torch.zeros(0)] * 3])
def test_no_token_has_no_perplexity(losses: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="losses must hold at least one token"):
        perplexity(losses)


@given(st.lists(st.lists(st.floats(0, 20), max_size=5), min_size=1, max_size=4).filter(any))
def test_perplexity_is_the_geometric_mean_over_tokens(losses: list[list[float]]) -> None:
    tensors = [torch.tensor(one, dtype=torch.float64) for one in losses]
    tokens = [loss for one in losses for loss in one]
    wanted = math.prod(math.exp(loss / len(tokens)) for loss in tokens)
    assert perplexity(tensors) == pytest.approx(wanted)


@given(st.sampled_from(KINDS), st.integers(2, 400), st.integers(1, 50), st.integers(0, 2**32))
def test_passages(kind: str, length: int, continuation: int, seed: int) -> None:
    tokenizer = tokenizer_of(kind)
    task = Perplexity(continuation=continuation)
    text = "".join(chr(97 + at * at % 26) for at in range(900))
    start = [] if kind not in ("bos", "embedded") else list(tokenizer("a")["input_ids"][:-1])
    if length - len(start) <= continuation:
        with pytest.raises(ValueError, match=f"of which the last {continuation} are scored"):
            task.texts(tokenizer, length=length, text=text)
        return
    whole = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(whole) + len(start) < length:
        with pytest.raises(ValueError, match=f"but the longest text has {len(whole)}"):
            task.texts(tokenizer, length=length, text=text)
        return
    first, second = task.texts(tokenizer, length=length, count=2, seed=seed, text=text)
    assert first == task.texts(tokenizer, length=length, count=1, seed=seed, text=text)[0]
    for one in (first, second):
        at = one.extra["start"]
        passage = [*one.context_ids[len(start) :], *one.continuation_ids]
        assert list(one.context_ids[: len(start)]) == start
        assert len(start) + len(passage) == length
        assert len(one.continuation_ids) == continuation
        assert passage == whole[at : at + len(passage)]
    assert (first.id, second.id) == ("0", "1")


def test_files_of_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    task = Perplexity(continuation=4)
    body = "A book of many words. " * 20
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name + body, encoding="utf-8")
    (tmp_path / "books.jsonl").write_text(json.dumps({"text": body}), encoding="utf-8")
    whole = task.texts(tokenizer, length=60, count=9, data=tmp_path)
    assert {one.extra["text"] for one in whole} == {0, 1}
    one = task.texts(tokenizer, length=60, count=1, data=tmp_path / "a.txt")[0]
    assert one == task.texts(tokenizer, length=60, count=1, text="a.txt" + body.strip())[0]
    assert task.texts(tokenizer, length=60, count=1, data=tmp_path / "books.jsonl")
    assert len(task.texts(tokenizer, length=100)) == 8
    (tmp_path / "none").mkdir()
    with pytest.raises(MissingData, match=r"perplexity: .*none has no \.txt file"):
        task.texts(tokenizer, data=tmp_path / "none")
    with pytest.raises(MissingData, match=r"there is no file or folder .*missing"):
        task.texts(tokenizer, data=tmp_path / "missing")
    with pytest.raises(ValueError, match="takes data or text, not both"):
        task.texts(tokenizer, data=tmp_path, text="x")
