"""Entries of a budget for a target in device bytes, found by running the method."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kv_integration.attach import Attached
from kv_integration.budget import BudgetTooSmallError, check_budget
from kv_integration.cache import KVCache
from kv_integration.method import Method

PRECISION = 0.02  # of the target


class ShareTooSmallError(ValueError):
    """No budget of a method keeps within a share of full KV; `least` is the nearest it comes."""

    def __init__(self, text: str, *, least: float) -> None:
        super().__init__(text)
        self.least = least


class DevicePeak(BaseStreamer):
    """Notes, at each token that `generate` streams, how much of full KV is on the device."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.share = cache, 0.0

    def put(self, value: Tensor) -> None:
        report = self.cache.report()
        if report.full_kv_bytes:  # `generate` streams the prompt before it runs
            self.share = max(self.share, report.device_bytes / report.full_kv_bytes)

    def end(self) -> None:
        """Nothing is left to note."""


def device_share(kv: Attached, method: Method, ids: Tensor, *, steps: int = 8) -> float:
    """Bytes on the device over those of full KV, the most after any of `steps` greedy tokens.

    ids: int64[B, T], the prompt, without padding.
    """
    cache = kv.cache(method)
    peak = DevicePeak(cache)
    options: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None}
    generate: Any = kv.model.generate
    # a streamer takes one row; further rows hold as much
    generate(
        ids[:1],
        attention_mask=torch.ones_like(ids[:1]),
        past_key_values=cache,
        streamer=peak,
        pad_token_id=0,
        **options,
    )
    return peak.share


def for_device_share(
    kv: Attached, method: Method, ids: Tensor, share: float, *, steps: int = 8
) -> Method:
    """`method` with the largest budget, in entries, that keeps within `share` of full KV's bytes.

    What a method holds beside the entries that a step attends (means, scores, routing keys, what
    it fetched last, room to grow) differs, so methods that are compared at equal device bytes, as
    SeKV's section 3.3 does, need a budget each. It is found to 2% of the target, in bytes or entries,
    with the reports of real steps: a few runs of the prompt.

    Args:
        kv: the attached model.
        method: its budget is replaced.
        ids: int64[1, T], a prompt of the kind and length that will be compared.
        share: target in (0, 1], such as 0.1.
        steps: greedy tokens after the prompt, whose peak counts.

    Raises:
        TypeError: `method` has no budget.
        ShareTooSmallError: no budget keeps within `share`; the text says how near it comes.
    """
    check_budget(float(share))
    if "budget" not in {field.name for field in dataclasses.fields(method)}:  # type: ignore[arg-type]
        raise TypeError(f"{method.name} has no budget to plan")
    tokens = ids.shape[1]
    low, high, best, least = 0, tokens + 1, None, math.inf
    budget, halve = round(share * tokens), False
    while high - low > max(PRECISION * share * tokens, 1):
        budget = min(max(budget, low + 1), high - 1)
        trial: Method = dataclasses.replace(method, budget=budget)  # type: ignore[type-var]
        try:
            reached = device_share(kv, trial, ids, steps=steps)
        except BudgetTooSmallError as error:
            low = max(budget, min(error.least, high) - 1)
            budget = low + 1
            continue
        least = min(least, reached)
        if reached <= share:
            low, best = budget, trial
            if reached > (1 - PRECISION) * share:
                break
        else:
            high = budget
        # An entry more takes about as much as in full KV; where it does not, halving gets there.
        budget += round((share - reached) * tokens)
        if halve:
            budget = (low + high) // 2
        halve = not halve
    if best is None:
        raise ShareTooSmallError(
            f"{method.name} cannot keep within share {share} of full KV on a prompt of {tokens} "
            f"tokens: the least it reaches is {least:.3f}",
            least=least,
        )
    return best
