"""Divergence from full KV behind one prefill, against every method alone on a cache of its own."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import make_model, make_tokenizer

from kv_bench.cli import main
from kv_bench.divergence import compared
from kv_bench.tasks import ScoredText
from kv_integration import FullKV, Quest, ShadowKV, SnapKV, attach

VOCABULARY = 50
model, tokenizer = make_model(VOCABULARY), make_tokenizer()
METHODS = [SnapKV(budget=6), FullKV(), ShadowKV(budget=12, chunk=2, window=4), Quest(budget=5)]
words = st.integers(0, VOCABULARY - 1)


def alone(text, method):
    """Probabilities float64[n - 1, V] after each token of the continuation but the last."""
    with attach(model, tokenizer) as kv, torch.no_grad():
        cache = kv.cache(method)
        model(torch.tensor([text.context_ids]), past_key_values=cache)
        steps = [
            model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0]
            for token in text.continuation_ids[:-1]
        ]
    return torch.stack(steps).double().softmax(-1)


@given(st.lists(words, min_size=20, max_size=40), st.lists(words, min_size=2, max_size=6))
@settings(max_examples=15)
def test_it_is_that_of_each_method_alone(context, continuation):
    text = ScoredText("0", tuple(context), tuple(continuation))
    with torch.no_grad():
        whole = model(torch.tensor([context + continuation])).logits[0].double().softmax(-1)
    full = whole[len(context) : -1]
    found = compared(model, tokenizer, text, METHODS)
    for (kl, same), method in zip(found.tolist(), METHODS, strict=True):
        other = alone(text, method)
        each = [sum(p * (p / q).log()) for p, q in zip(full, other, strict=True)]
        assert kl == pytest.approx(float(sum(each) / len(each)), abs=1e-5)
        likeliest = zip(full.argmax(-1).tolist(), other.argmax(-1).tolist(), strict=True)
        assert same == pytest.approx(sum(a == b for a, b in likeliest) / len(each))
    assert found[1].tolist() == [0, 1]


def test_a_row_per_setting_length_and_budget(tmp_path):
    file = tmp_path / "divergence.json"
    options = ["--methods", "shadowkv", "--vary", "rank=2", "--contexts", "256,512"]
    options += ["--samples", "1", "--tokens", "8", "--budgets", "0.1,1.0", "--json", str(file)]
    run = CliRunner().invoke(main, ["divergence", *options])
    assert run.exit_code == 0, run.output
    rows = json.loads(file.read_text())["rows"]
    kl = {(row["case"], row["context"], row["budget"]): row["kl"] for row in rows}
    assert len(rows) == len(kl) == 8
    for length in (256, 512):
        # nothing is left out, and no rank: all that is left is rounding
        assert abs(kl["shadowkv", length, 1.0]) < 1e-5
        assert kl["shadowkv(rank=2)", length, 1.0] > 1e-4


def test_one_token_has_nothing_to_compare():
    run = CliRunner().invoke(main, ["divergence", "--methods", "quest", "--tokens", "1"])
    assert run.exit_code == 2 and "1 is not in the range x>=2" in run.output
