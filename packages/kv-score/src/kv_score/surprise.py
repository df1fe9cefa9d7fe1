"""How unexpected each token was to the model, without ever holding all logits."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from kv_score._checks import (
    check_device,
    check_mask,
    check_positive,
    check_readable,
    check_tensor,
)


@torch.no_grad()
def surprisal(
    hidden: Float[Tensor, "b t e"],
    lm_head_weight: Float[Tensor, "v e"],
    ids: Int64[Tensor, "b t"],
    *,
    mask: Bool[Tensor, "b t"] | None = None,
    chunk: int = 1024,
    vocab_chunk: int = 4096,
) -> Float32[Tensor, "b t"]:
    """Surprisal of each token in nats: H_t = logsumexp_v(W_v . h_{t-1}) - W_{id_t} . h_{t-1}.

    Shapes: `hidden` [B, T, E], the states that enter the LM head; `lm_head_weight` [V, E] of the
    same dtype; `ids` int64[B, T]; result float32[B, T]. A row's first token has no prediction:
    its surprisal is 0, and so is that of every token where `mask` (True where a token exists) is
    False or whose predecessor does not exist. Logits are computed in the dtype of `hidden`, as
    the model does, and summed in float32; never more logits are held than `chunk` positions by
    `vocab_chunk` words in float32 take.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, ids outside the vocabulary.
    Source: SeKV section 3.1, Eq. 1.
    """
    check_tensor("hidden", hidden, ndim=3)
    check_tensor("lm_head_weight", lm_head_weight, ndim=2)
    check_tensor("ids", ids, ndim=2, floating=False)
    batch, tokens, width = hidden.shape
    vocab = lm_head_weight.shape[0]
    if lm_head_weight.shape[1] != width or lm_head_weight.dtype != hidden.dtype:
        raise ValueError(
            f"lm_head_weight must be [V, {width}] of {hidden.dtype} like hidden, "
            f"got {tuple(lm_head_weight.shape)} of {lm_head_weight.dtype}"
        )
    if ids.dtype != torch.int64:
        raise TypeError(f"ids must be of dtype torch.int64, got {ids.dtype}")
    if ids.shape != hidden.shape[:2]:
        raise ValueError(f"ids must have shape {(batch, tokens)}, got {tuple(ids.shape)}")
    check_device("lm_head_weight", lm_head_weight, hidden.device)
    check_device("ids", ids, hidden.device)
    if mask is not None:
        check_mask("mask", mask, (batch, tokens), hidden.device)
    check_positive("chunk", chunk)
    check_positive("vocab_chunk", vocab_chunk)
    check_readable("ids", ids)
    known = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.clone()
    known[:, 1:] &= known[:, :-1].clone()
    known[:, :1] = False
    places = known.flatten().nonzero()[:, 0]
    if len(places):
        low, high = (int(bound) for bound in ids[known].aminmax())
        if low < 0 or high >= vocab:
            raise ValueError(f"ids must lie within the {vocab} words, got {low} to {high}")

    result = hidden.new_zeros(batch, tokens, dtype=torch.float32)
    for start in range(0, len(places), chunk):
        place = places[start : start + chunk]
        row, column = place // tokens, place % tokens
        result[row, column] = _negative_log_likelihood(
            hidden[row, column - 1], lm_head_weight, ids[row, column], vocab_chunk
        )
    return result


def _negative_log_likelihood(states: Tensor, weight: Tensor, ids: Tensor, step: int) -> Tensor:
    """float32[N] for states [N, E], one slice of `step` words' float32 logits at a time."""
    if weight.dtype != torch.float32:  # the logits stand beside their float32 copy for a moment
        step = max(step * 4 // (4 + weight.itemsize), 1)
    top = torch.full(ids.shape, torch.finfo(torch.float32).min, device=states.device)
    total = torch.zeros_like(top)
    chosen = torch.zeros_like(top)
    for start in range(0, weight.shape[0], step):
        logits = (states @ weight[start : start + step].mT).float()
        inside = (ids >= start) & (ids < start + logits.shape[1])
        column = (ids - start).clamp(0, logits.shape[1] - 1)
        chosen += torch.where(inside, logits.gather(1, column[:, None])[:, 0], 0.0)
        higher = torch.maximum(top, logits.amax(1))
        total.mul_(torch.exp(top - higher)).add_(logits.sub_(higher[:, None]).exp_().sum(1))
        top = higher
        del logits  # or the next slice is built beside it
    # The maximum and the sum stay apart: as one number, large logits would eat the sum's digits.
    return total.log() + (top - chosen)
