"""A budget for a target in device bytes: kept, and not by more than it must."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from families import prompt, shared

from kv_integration import FullKV, SeKV, SnapKV, attach
from kv_integration.planner import device_share, for_device_share

METHODS = [SnapKV(window=8), SeKV(window=16, sinks=1, max_length=32, max_rank=8)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_the_budget_is_the_largest_that_keeps_the_share(tokenizer, method, share):
    model, ids = shared("llama"), prompt(400)["input_ids"]
    with attach(model, tokenizer) as kv:
        planned = for_device_share(kv, method, ids, share, steps=3)
        assert device_share(kv, planned, ids, steps=3) <= share
        wider = dataclasses.replace(planned, budget=planned.budget + 5)
        assert device_share(kv, wider, ids, steps=3) > share - 0.02
    assert dataclasses.replace(planned, budget=method.budget) == method


def test_the_share_is_that_of_the_report(tokenizer):
    model, ids = shared("llama"), prompt(400)["input_ids"]
    with attach(model, tokenizer) as kv:
        cache = kv.cache(SnapKV(budget=60))
        model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        report = cache.report()
        share = device_share(kv, SnapKV(budget=60), ids, steps=3)
    assert share >= report.device_bytes / report.full_kv_bytes
    assert share == pytest.approx(report.device_bytes / report.full_kv_bytes, rel=0.05)


def test_a_share_that_cannot_be_kept_says_how_near_it_comes(tokenizer):
    model, ids = shared("llama"), prompt(200)["input_ids"]
    with attach(model, tokenizer) as kv:
        with pytest.raises(
            ValueError, match=r"snapkv cannot keep within share 0.02 .* is 0\.0[45]"
        ):
            for_device_share(kv, SnapKV(window=8), ids, 0.02, steps=2)
        with pytest.raises(TypeError, match="full has no budget to plan"):
            for_device_share(kv, FullKV(), ids, 0.5)
        with pytest.raises(ValueError, match=r"must be in \(0, 1\], got 1.5"):
            for_device_share(kv, SnapKV(), torch.ones(1, 4), 1.5)
