"""No rows in, no rows out: an empty batch through every function."""

from __future__ import annotations

import pytest
import torch

import kv_attn_triton as kv

Q, K, V = torch.ones(0, 4, 1, 8), torch.ones(0, 2, 5, 8), torch.ones(0, 2, 5, 6)
IDX, TABLE = torch.ones(0, 2, 3, dtype=torch.int64), torch.ones(1, 5, 8)
STATE = ((0, 4, 1, 6), (0, 4, 1))
CALLS = {
    "attention": (lambda impl: kv.attention(Q, K, V, impl=impl), STATE),
    "causal": (
        lambda impl: kv.attention(
            Q.expand(0, 4, 3, 8),
            K,
            V,
            log_size=torch.ones(0, 2, 5),
            lengths=torch.ones(0, 2, dtype=torch.int32),
            causal=True,
            impl=impl,
        ),
        ((0, 4, 3, 6), (0, 4, 3)),
    ),
    "selected": (lambda impl: kv.selected_attention(Q, K, V, IDX, impl=impl), STATE),
    "lowrank": (
        lambda impl: kv.lowrank_attention(
            Q, torch.ones(0, 5, 3), torch.ones(0, 2, 3, 8), V, IDX, TABLE, TABLE, impl=impl
        ),
        STATE,
    ),
    "spans": (
        lambda impl: kv.span_attention(
            Q,
            torch.ones(0, 2, 5, 3),
            torch.ones(0, 2, 2, 3, 8),
            torch.ones(0, 2, 5, 4),
            torch.ones(0, 2, 2, 4, 6),
            torch.tensor([0, 2, 5]),
            IDX,
            longest=3,
            impl=impl,
        ),
        STATE,
    ),
    "landmarks": (lambda impl: kv.landmark_topk(Q, K, 3, impl=impl), (0, 2, 3)),
    "window": (lambda impl: kv.window_scores(Q, K, impl=impl), (0, 4, 4)),
    "cluster": (
        lambda impl: kv.cluster(K, torch.tensor([0, 5]), theta=0.5, impl=impl),
        (0, 2, 5),
    ),
}


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("case", CALLS)
def test_an_empty_batch(case, impl):
    call, wanted = CALLS[case]
    got = call(impl)
    shapes = tuple(x.shape for x in got) if isinstance(got, tuple) else got.shape
    assert shapes == wanted


def test_an_empty_batch_merges():
    part = torch.ones(STATE[0]), torch.ones(STATE[1])
    out, lse = kv.merge_states([part, part])
    assert (out.shape, lse.shape) == STATE
