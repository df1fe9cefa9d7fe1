"""Scores of stored summaries (sentence means, chunk landmarks) for the queries of a step."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from kv_score._checks import check_choice, check_mask, check_number, check_queries_and_keys
from kv_score._groups import pack


@torch.no_grad()
def segment_scores(
    q_bar: Float[Tensor, "b h_q d"],
    means: Float[Tensor, "b h_kv s d"],
    *,
    reduce: Literal["mean", "max"] = "mean",
    mask: Bool[Tensor, "b s"] | None = None,
) -> Float32[Tensor, "b h_kv s"]:
    """Similarity of a mean query to each segment's mean key: q_bar . k_bar, over the GQA group.

    S_k = mean (or max) over the group's query heads h of q_bar_h . k_bar_k, not scaled.

    Shapes: `q_bar` [B, H_q, D], `means` [B, H_kv, S, D], result float32[B, H_kv, S]. `mask` is
    True where a row has the segment; the others are not read and score -inf.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices, `reduce`.
    Source: SentenceKV section 4.2 (the mean over the group is ours: the paper has one query head
    per key head).
    """
    check_queries_and_keys("q_bar", q_bar, "means", means, query_ndim=3)
    check_choice("reduce", reduce, ("mean", "max"))
    if mask is not None:
        check_mask("mask", mask, (means.shape[0], means.shape[2]), means.device)
    grouped = q_bar.float().unflatten(1, (means.shape[1], -1))  # [B, H_kv, G, D]
    if reduce == "mean":
        grouped = grouped.mean(2, keepdim=True)
    scores = (grouped @ means.float().mT).amax(2)
    return scores if mask is None else scores.masked_fill(~mask[:, None], -math.inf)


@torch.no_grad()
def landmark_scores(
    queries: Float[Tensor, "b h_q n d"],
    landmarks: Float[Tensor, "b h_kv c d"],
    *,
    scale: float | None = None,
    mask: Bool[Tensor, "b h_kv c"] | None = None,
    query_mask: Bool[Tensor, "b n"] | None = None,
) -> Float32[Tensor, "b h_kv c"]:
    """Attention over landmarks: softmax per query head, sum over queries, max over the group.

    S_c = max_{h in group} sum_n softmax_c(scale * q_hn . l_c).

    Shapes: `queries` [B, H_q, N, D], `landmarks` [B, H_kv, C, D], result float32[B, H_kv, C].
    `scale` is 1/sqrt(D) unless given. `mask` [B, H_kv, C] is True where a landmark may be chosen
    (False: an outlier kept elsewhere, or padding); the others are not read and score -inf.
    `query_mask` [B, N] is True where a query exists; the others are not read and add nothing.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices.
    Source: ShadowKV Algorithm 2.
    """
    group = check_queries_and_keys("queries", queries, "landmarks", landmarks)
    if scale is not None:
        check_number("scale", scale)
    if mask is not None:
        check_mask("mask", mask, tuple(landmarks.shape[:3]), landmarks.device)
    if query_mask is not None:
        check_mask("query_mask", query_mask, (len(queries), queries.shape[2]), queries.device)
        # What does not exist may hold anything: it must not reach a sum.
        queries = queries.masked_fill(~query_mask[:, None, :, None], 0.0)
    packed = pack(queries, landmarks.shape[1])
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    logits = packed.mul(scale) @ landmarks.float().mT  # [B, H_kv, G*N, C]
    if mask is not None:
        # The lowest finite number, not -inf: a row with nothing to choose must not become NaN.
        hidden = ~mask[:, :, None]
        logits.masked_fill_(hidden, torch.finfo(torch.float32).min)
    weights = logits.softmax(-1).unflatten(2, (group, queries.shape[2]))
    if query_mask is not None:
        weights.masked_fill_(~query_mask[:, None, None, :, None], 0.0)
    scores = weights.sum(3).amax(2)
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)
