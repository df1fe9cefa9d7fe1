"""Scores of keys under attention: which chunks to fetch, which tokens a window looks at."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from . import checks
from .dispatch import Impl, use_triton
from .reference import columns as plain

Reduce = Literal["none", "kv_head", "layer"]


def landmark_topk(
    q: Float[Tensor, "B Hq Q D"],
    landmarks: Float[Tensor, "B Hkv L D"],
    count: int,
    *,
    mask: Bool[Tensor, "B Hkv L"] | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Int64[Tensor, "B Hkv count"]:
    """top-count over l of S_l = max_{h in group} sum_j softmax_l(scale q_hj . landmark_l).

    q [B, H_q, Q, D], landmarks [B, H_kv, L, D] of one dtype -> int64[B, H_kv, count], ascending
    and unique per head, -1 last where there are fewer than `count` landmarks to choose from.
    mask: bool[B, H_kv, L], False landmarks take no part and are never chosen. Scores and softmax
    are float32; ties go either way. With Triton two launches score, normalise, take the maximum
    over the group and select, up to 32,768 landmarks; past that torch.topk selects.

    Raises ValueError for count below 0, shapes, devices or impl, TypeError for dtypes.
    Source: ShadowKV Algorithm 2 (S, S_1, S_2, I).
    """
    checks.check_query_key(q, landmarks, name="landmarks")
    if count < 0:
        raise ValueError(f"count must be 0 or more, got {count}")
    if mask is not None:
        checks.check_mask(mask, tuple(landmarks.shape[:3]), q)
    factor = checks.resolve_scale(scale, q.shape[3])
    if use_triton(impl, q):
        from .kernels import landmarks as kernel

        return kernel.landmark_topk(q, landmarks, count, mask, factor)
    checks.check_on_device(q, landmarks=landmarks)
    scores = plain.highest_shares(q, landmarks, mask, factor)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return plain.pick(scores, count)


def window_scores(
    q: Float[Tensor, "B Hq W D"],
    k: Float[Tensor, "B Hkv N D"],
    *,
    mask: Bool[Tensor, "B N"] | None = None,
    reduce: Reduce = "none",
    scale: float | None = None,
    impl: Impl = "auto",
) -> Float32[Tensor, "B Hout Nearlier"]:
    """s_n = sum_j softmax_n(scale q_j . k_n): attention of the last W queries to earlier keys.

    q [B, H_q, W, D] are the queries of the last W of the N positions of k [B, H_kv, N, D]; each
    sees the keys up to its own. Result float32[B, H, N - W]: reduce "none" keeps query heads
    (H = H_q), "kv_head" is the mean of each group (H = H_kv), "layer" the mean of all (H = 1).
    mask: bool[B, N], True where a token exists (padding is False): other keys are not attended
    and score -inf, a query at such a position counts for nothing. Keys are streamed twice, for the
    softmax sums and for the scores; only a tile of queries by keys is held at a time.

    Raises ValueError for W > N, shapes, devices, reduce or impl, TypeError for dtypes.
    Source: SnapKV; SentenceKV section 4.1; SABlock Eqs. 3 and 4.
    """
    checks.check_query_key(q, k)
    batch, query_heads, window, size = q.shape
    heads, n = k.shape[1], k.shape[2]
    if window > n:
        raise ValueError(f"q must hold at most as many queries as k has keys ({n}), got {window}")
    if reduce not in ("none", "kv_head", "layer"):
        raise ValueError(f"reduce must be 'none', 'kv_head' or 'layer', got {reduce!r}")
    if mask is not None:
        checks.check_mask(mask, (batch, n), q)
    factor = checks.resolve_scale(scale, size)
    per_head = None if mask is None else mask.unsqueeze(1).expand(batch, heads, n)
    end = n - window
    if use_triton(impl, q):
        from .kernels import columns as kernel

        kind: kernel.Kind = "none" if reduce == "none" else "sum"
        sums = kernel.column_sums(q, k, per_head, factor, True, end, kind)
    else:
        checks.check_on_device(q, k=k)
        sums = plain.column_sums(q, k, per_head, factor, True, end)
    if reduce == "none":
        scores = sums.reshape(batch, query_heads, end)
    else:
        scores = sums.sum(2) / (query_heads // heads)
        if reduce == "layer":
            scores = scores.mean(1, keepdim=True)
    return scores if mask is None else scores.masked_fill(~mask[:, None, :end], -torch.inf)
