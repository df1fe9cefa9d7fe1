"""Wrong input is refused by name before any work, with and without the kernels."""

from __future__ import annotations

import re

import pytest
import torch
from laws import plain

import kv_attn_triton as kv

Q, K, V = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 6)
IDX = torch.zeros(1, 2, 3, dtype=torch.int64)
SHIFTED = torch.ones(1, 2, 8, 5).transpose(2, 3)

BAD_ATTENTION = {
    "rank of q": ((Q[0], K, V), {}, ValueError, "q must have 4 dimensions, got shape (4, 1, 8)"),
    "rank of k": ((Q, K[0], V), {}, ValueError, "k must have 4 dimensions, got shape (2, 5, 8)"),
    "float64": (
        (Q.double(), K.double(), V.double()),
        {},
        TypeError,
        "q must be float32, bfloat16 or float16, got torch.float64",
    ),
    "dtype of k": (
        (Q, K.half(), V),
        {},
        TypeError,
        "k must have q's dtype torch.float32, got torch.float16",
    ),
    "dtype of v": (
        (Q, K, V.bfloat16()),
        {},
        TypeError,
        "v must have q's dtype torch.float32, got torch.bfloat16",
    ),
    "device of k": (
        (Q, K.to("meta"), V),
        {},
        ValueError,
        "k must be on q's device cpu (or in pinned host memory when that is CUDA), got meta",
    ),
    "batch": ((Q, K.repeat(2, 1, 1, 1), V), {}, ValueError, "k must have q's batch size 1, got 2"),
    "head size": (
        (Q, K[..., :4], V),
        {},
        ValueError,
        "k must have q's head size, at least 1; got 4 for q's 8",
    ),
    "heads": (
        (Q[:, :3], K, V),
        {},
        ValueError,
        "q must have a multiple of the 2 KV heads, got 3 query heads",
    ),
    "no KV heads": (
        (Q, K[:, :0], V),
        {},
        ValueError,
        "q must have a multiple of the 0 KV heads, got 4 query heads",
    ),
    "entries of v": (
        (Q, K, V[:, :, :4]),
        {},
        ValueError,
        "v must have shape [1, 2, 5, Dv >= 1], got (1, 2, 4, 6)",
    ),
    "strides of k": (
        (Q, SHIFTED, V),
        {},
        ValueError,
        "k must have a contiguous last dimension, got strides (80, 40, 1, 5)",
    ),
    "strides of v": (
        (Q, K, SHIFTED),
        {},
        ValueError,
        "v must have a contiguous last dimension, got strides (80, 40, 1, 5)",
    ),
    "scale": ((Q, K, V), {"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
    "impl": (
        (Q, K, V),
        {"impl": "cuda"},
        ValueError,
        "impl must be 'auto', 'triton' or 'reference', got 'cuda'",
    ),
    "log_size dtype": (
        (Q, K, V),
        {"log_size": torch.zeros(1, 2, 5).double()},
        TypeError,
        "log_size must be float32, got torch.float64",
    ),
    "log_size shape": (
        (Q, K, V),
        {"log_size": torch.zeros(1, 2, 4)},
        ValueError,
        "log_size must have shape [1, 2, 5], got [1, 2, 4]",
    ),
    "log_size device": (
        (Q, K, V),
        {"log_size": torch.zeros(1, 2, 5, device="meta")},
        ValueError,
        "log_size must be on q's device cpu, got meta",
    ),
}
BAD_LENGTHS = {
    "dtype": (torch.zeros(1, 2).long(), TypeError, "lengths must be int32, got torch.int64"),
    "shape": (
        torch.zeros(2, dtype=torch.int32),
        ValueError,
        "lengths must have shape [1, 2], got [2]",
    ),
    "long": (
        torch.tensor([[6, 1]], dtype=torch.int32),
        ValueError,
        "lengths must be between 0 and 5, got 6",
    ),
    "negative": (
        torch.tensor([[5, -1]], dtype=torch.int32),
        ValueError,
        "lengths must be between 0 and 5, got -1",
    ),
}
BAD_INDICES = {
    "dtype": (IDX.int(), TypeError, "indices must be int64, got torch.int32"),
    "shape": (IDX[:, :1], ValueError, "indices must have shape [1, 2, K], got (1, 1, 3)"),
    "device": (IDX.to("meta"), ValueError, "indices must be on q's device cpu, got meta"),
    "beyond": (
        IDX + 5,
        ValueError,
        "indices must be -1 (skipped) or between 0 and 4, got 5",
    ),
    "below": (IDX - 2, ValueError, "indices must be -1 (skipped) or between 0 and 4, got -2"),
}


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_bad_attention_arguments(case, impl):
    args, kw, error, message = BAD_ATTENTION[case]
    kw = {"impl": impl, **kw}
    with pytest.raises(error, match=re.escape(message)):
        plain(kv.attention)(*args, **kw)
    with pytest.raises(error, match=re.escape(message)):
        plain(kv.selected_attention)(*args, IDX, **kw)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("case", BAD_LENGTHS)
def test_bad_lengths(case, impl):
    lengths, error, message = BAD_LENGTHS[case]
    with pytest.raises(error, match=re.escape(message)):
        plain(kv.attention)(Q, K, V, lengths=lengths, impl=impl)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("case", BAD_INDICES)
def test_bad_indices(case, impl):
    indices, error, message = BAD_INDICES[case]
    with pytest.raises(error, match=re.escape(message)):
        plain(kv.selected_attention)(Q, K, V, indices, impl=impl)


PART = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1)
BAD_PARTS = {
    "none": ([], ValueError, "parts must hold at least one (out, lse), got none"),
    "shape": (
        [PART, (PART[0][:, :1], PART[1])],
        ValueError,
        "parts[1] must have out [1, 2, 1, 4] and lse [1, 2, 1], got [1, 1, 1, 4] and [1, 2, 1]",
    ),
    "dtype": (
        [PART, (PART[0].half(), PART[1])],
        TypeError,
        "parts[1] must have out torch.float32 and lse torch.float32, "
        "got torch.float16 and torch.float32",
    ),
    "device": (
        [PART, (PART[0].to("meta"), PART[1])],
        ValueError,
        "parts[1] must be on cpu, got meta",
    ),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts(case):
    parts, error, message = BAD_PARTS[case]
    with pytest.raises(error, match=re.escape(message)):
        plain(kv.merge_states)(parts)


LEFT, RIGHT = torch.ones(1, 5, 3), torch.ones(1, 2, 3, 8)
TABLE = torch.ones(1, 5, 8)
FACTORED = {
    "q": Q, "left": LEFT, "right": RIGHT, "v": V, "indices": IDX, "cos": TABLE, "sin": TABLE
}  # fmt: skip
BAD_FACTORS = {
    "rank of q": ({"q": Q[0]}, ValueError, "q must have 4 dimensions, got shape (4, 1, 8)"),
    "rank of left": ({"left": LEFT[0]}, ValueError, "left must have 3 dimensions"),
    "rank of right": ({"right": RIGHT[0]}, ValueError, "right must have 4 dimensions"),
    "rank of cos": ({"cos": TABLE[0]}, ValueError, "cos must have 3 dimensions"),
    "float64": (
        {"q": Q.double()},
        TypeError,
        "q must be float32, bfloat16 or float16, got torch.float64",
    ),
    "dtype of left": (
        {"left": LEFT.half()},
        TypeError,
        "left must have q's dtype torch.float32, got torch.float16",
    ),
    "dtype of right": (
        {"right": RIGHT.half()},
        TypeError,
        "right must have q's dtype torch.float32, got torch.float16",
    ),
    "batch of left": (
        {"left": LEFT.repeat(2, 1, 1)},
        ValueError,
        "left must have shape [1, N, r >= 1], got [2, 5, 3]",
    ),
    "rank of the factors": (
        {"right": RIGHT[:, :, :2]},
        ValueError,
        "right must have shape [1, 2, 3, 8], got [1, 2, 2, 8]",
    ),
    "heads": (
        {"q": Q[:, :3]},
        ValueError,
        "q must have a multiple of the 2 KV heads, got 3 query heads",
    ),
    "values": (
        {"values_gathered": True},
        ValueError,
        "v must have shape [1, 2, 3, Dv >= 1], got (1, 2, 5, 6)",
    ),
    "indices": (
        {"indices": IDX + 5},
        ValueError,
        "indices must be -1 (skipped) or between 0 and 4, got 5",
    ),
    "dtype of cos": (
        {"cos": TABLE.double()},
        TypeError,
        "cos must be float32 or torch.float32, got torch.float64",
    ),
    "odd cos": (
        {"cos": TABLE[..., :7]},
        ValueError,
        "cos must have shape [1 or 1, 5, even Dr <= 8], got [1, 5, 7]",
    ),
    "sin beside cos": (
        {"sin": TABLE[..., :4]},
        ValueError,
        "sin must have cos's shape [1, 5, 8], got [1, 5, 4]",
    ),
    "device of sin": (
        {"sin": TABLE.to("meta")},
        ValueError,
        "sin must be on q's device cpu, got meta",
    ),
    "log_size": (
        {"log_size": torch.zeros(1, 2, 3)},
        ValueError,
        "log_size must have shape [1, 2, 5], got [1, 2, 3]",
    ),
    "scale": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "impl": (
        {"impl": "cpu"},
        ValueError,
        "impl must be 'auto', 'triton' or 'reference', got 'cpu'",
    ),
}


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("case", BAD_FACTORS)
def test_bad_factors(case, impl):
    changes, error, message = BAD_FACTORS[case]
    with pytest.raises(error, match=re.escape(message)):
        plain(kv.lowrank_attention)(**{"impl": impl, **FACTORED, **changes})


BAD_SCORING = {
    "landmark count": (
        lambda: plain(kv.landmark_topk)(Q, K, -1),
        ValueError,
        "count must be 0 or more, got -1",
    ),
    "landmark rank": (
        lambda: plain(kv.landmark_topk)(Q, K[0], 1),
        ValueError,
        "landmarks must have 4 dimensions, got shape (2, 5, 8)",
    ),
    "landmark mask": (
        lambda: plain(kv.landmark_topk)(Q, K, 1, mask=torch.ones(1, 5, dtype=torch.bool)),
        ValueError,
        "mask must have shape [1, 2, 5], got [1, 5]",
    ),
    "landmark mask dtype": (
        lambda: plain(kv.landmark_topk)(Q, K, 1, mask=torch.ones(1, 2, 5)),
        TypeError,
        "mask must be bool, got torch.float32",
    ),
    "wide window": (
        lambda: plain(kv.window_scores)(Q.repeat(1, 1, 6, 1), K),
        ValueError,
        "q must hold at most as many queries as k has keys (5), got 6",
    ),
    "reduce": (
        lambda: plain(kv.window_scores)(Q, K, reduce="head"),
        ValueError,
        "reduce must be 'none', 'kv_head' or 'layer', got 'head'",
    ),
    "window mask": (
        lambda: plain(kv.window_scores)(Q, K, mask=torch.ones(1, 4, dtype=torch.bool)),
        ValueError,
        "mask must have shape [1, 5], got [1, 4]",
    ),
    "cluster rank": (
        lambda: plain(kv.cluster)(K[0], torch.tensor([0, 5]), theta=0.5),
        ValueError,
        "keys must have 4 dimensions, got shape (2, 5, 8)",
    ),
    "cluster dtype": (
        lambda: plain(kv.cluster)(K.long(), torch.tensor([0, 5]), theta=0.5),
        TypeError,
        "keys must be float32, bfloat16 or float16, got torch.int64",
    ),
    "cluster strides": (
        lambda: plain(kv.cluster)(SHIFTED, torch.tensor([0, 5]), theta=0.5),
        ValueError,
        "keys must have a contiguous last dimension, got strides (80, 40, 1, 5)",
    ),
    "cluster head size": (
        lambda: plain(kv.cluster)(K[..., :0], torch.tensor([0, 5]), theta=0.5),
        ValueError,
        "keys must have a head size of at least 1, got 0",
    ),
    "theta": (
        lambda: plain(kv.cluster)(K, torch.tensor([0, 5]), theta=float("nan")),
        ValueError,
        "theta must be finite, got nan",
    ),
    "offsets dtype": (
        lambda: plain(kv.cluster)(K, torch.tensor([0, 5]).int(), theta=0.5),
        TypeError,
        "offsets must be int64, got torch.int32",
    ),
    "offsets shape": (
        lambda: plain(kv.cluster)(K, torch.tensor([[0, 5]]), theta=0.5),
        ValueError,
        "offsets must have shape [S+1], got [1, 2]",
    ),
    "offsets range": (
        lambda: plain(kv.cluster)(K, torch.tensor([0, 4]), theta=0.5),
        ValueError,
        "offsets must run from 0 to 5, got 0 to 4",
    ),
    "offsets order": (
        lambda: plain(kv.cluster)(K, torch.tensor([0, 3, 3, 5]), theta=0.5),
        ValueError,
        "offsets must increase strictly, got [0, 3, 3, 5]",
    ),
}


@pytest.mark.parametrize("case", BAD_SCORING)
def test_bad_scoring_and_clustering(case):
    call, error, message = BAD_SCORING[case]
    with pytest.raises(error, match=re.escape(message)):
        call()
