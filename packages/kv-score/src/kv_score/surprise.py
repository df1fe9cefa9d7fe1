"""How unexpected each token was to the model, without ever holding all logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from kv_score._checks import (
    check_device,
    check_mask,
    check_positive,
    check_readable,
    check_shape,
    check_tensor,
)


@torch.no_grad()
def surprisal(
    hidden: Float[Tensor, "b t e"],
    lm_head_weight: Float[Tensor, "v e"],
    ids: Int64[Tensor, "b t"],
    *,
    mask: Bool[Tensor, "b t"] | None = None,
    bias: Float[Tensor, " v"] | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
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

    Heads that do more: logits are (W_v . h + `bias`[v]) * `logit_scale`, as Cohere and Granite
    scale them, then softcap * tanh(logits / softcap) where `softcap` is given, as in Gemma 2.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, ids outside the vocabulary,
    a scale or softcap that is not positive.
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
    if bias is not None:
        check_tensor("bias", bias, ndim=1)
        check_shape("bias", bias, (vocab,))
        check_device("bias", bias, hidden.device)
    for name, value in (("logit_scale", logit_scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be finite and above 0, got {value}")
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

    def logits(states: Tensor, words: slice) -> Tensor:
        product = states @ lm_head_weight[words].mT
        if bias is not None:
            product += bias[words]
        product = product.float().mul_(logit_scale)
        return product if softcap is None else product.div_(softcap).tanh_().mul_(softcap)

    if hidden.dtype != torch.float32:  # logits stand beside their float32 copy for a moment
        vocab_chunk = max(vocab_chunk * 4 // (4 + hidden.itemsize), 1)
    words = [slice(v, min(v + vocab_chunk, vocab)) for v in range(0, vocab, vocab_chunk)]
    result = hidden.new_zeros(batch, tokens, dtype=torch.float32)
    for start in range(0, len(places), chunk):
        place = places[start : start + chunk]
        row, column = place // tokens, place % tokens
        states = hidden[row, column - 1]
        slices = ((part.start, logits(states, part)) for part in words)
        result[row, column] = _negative_log_likelihood(slices, ids[row, column])
    return result


def _negative_log_likelihood(slices: Iterator[tuple[int, Tensor]], ids: Tensor) -> Tensor:
    """float32[N] from slices [N, v] of the logits, each with its first word; they are used up."""
    top = torch.full(ids.shape, torch.finfo(torch.float32).min, device=ids.device)
    total = torch.zeros_like(top)
    chosen = torch.zeros_like(top)
    for start, logits in slices:
        inside = (ids >= start) & (ids < start + logits.shape[1])
        column = (ids - start).clamp(0, logits.shape[1] - 1)
        chosen += torch.where(inside, logits.gather(1, column[:, None])[:, 0], 0.0)
        higher = torch.maximum(top, logits.amax(1))
        # by powers of two, which are faster than those of e
        powers = logits.sub_(higher[:, None]).mul_(math.log2(math.e)).exp2_()
        total.mul_(torch.exp(top - higher)).add_(powers.sum(1))
        top = higher
        del logits, powers  # or the next slice is built beside it
    # The maximum and the sum stay apart: as one number, large logits would eat the sum's digits.
    return total.log() + (top - chosen)
