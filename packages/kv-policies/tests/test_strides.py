"""Scores in any layout give what they give contiguous, and are left as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kv_policies as kp

OFFSETS = torch.tensor([0, 1, 4, 9, 10, 24])

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "top_tokens": lambda x: kp.top_tokens(x, 7, protected=kp.keep_window(24, 2)),
    "top_segments": lambda x: kp.top_segments(x[..., :5], x, OFFSETS, 9),
    "adaptive_blocks": lambda x: kp.adaptive_blocks(x, OFFSETS, 9, max_block=4, delta=0.7),
    "head_budgets": lambda x: kp.head_budgets(x, 20),
    "expand_spans": lambda x: (
        kp.expand_spans(x[..., :5], 0.3, OFFSETS, 12, n=24, kv_heads=2).indices
    ),
    "merge": lambda x: (
        kp.merge(
            x[..., None].expand(-1, -1, -1, 3), x[..., None], torch.zeros(x.shape).long()
        ).values
    ),
}


@pytest.mark.parametrize("name", CALLS)
@given(seed=st.integers(0, 2**32 - 1), order=st.permutations([0, 1, 2]), step=st.integers(1, 2))
def test_strides_do_not_show(name: str, seed: int, order: list[int], step: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 9, (2, 4, 24), generator=generator) / 8
    back = [order.index(d) for d in range(3)]
    laid = scores.permute(order).repeat_interleave(step, dim=2).contiguous()
    view = laid[..., ::step].permute(back)
    expected = CALLS[name](scores)
    assert torch.equal(CALLS[name](view), expected)
    assert torch.equal(view, scores)
    shared = scores[:1, :1].expand(scores.shape)
    assert torch.equal(CALLS[name](shared), CALLS[name](shared.clone()))
