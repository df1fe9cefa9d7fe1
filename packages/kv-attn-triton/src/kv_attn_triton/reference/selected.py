"""Attention over entries picked by index, in plain torch."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .attention import State, attend, pack, unpack


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    log_size: Tensor | None,
    scale: float,
    padded: bool,
) -> State:
    """See `kv_attn_triton.selected_attention`. Only the picked entries are copied."""
    keys, values, bias = gather(k, indices), gather(v, indices), None
    if log_size is not None:
        bias = gather(log_size.unsqueeze(-1), indices).squeeze(-1)
    if padded:
        bias = forbid_padding(indices, bias, keys, values)
    state = attend(pack(q, k.shape[1]), keys, values, bias, scale)
    return unpack(state, q.shape[1], q.shape[2])


def forbid_padding(indices: Tensor, bias: Tensor | None, *gathered: Tensor) -> Tensor:
    """Zeroes, in place, what -1 fetched (it may be NaN) and returns the bias that forbids it."""
    skipped = indices < 0
    for x in gathered:
        x.masked_fill_(skipped.unsqueeze(-1), 0)
    if bias is None:
        bias = torch.zeros(indices.shape, dtype=torch.float32, device=indices.device)
    return bias.masked_fill_(skipped, -torch.inf)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """x [B, H, N, D], indices [B, H, K] -> fresh [B, H, K, D]; what -1 fetches means nothing.

    Any strided view with a contiguous last dimension is read as one list of rows, so that a slice
    or half of a larger buffer is not copied, by one index_select: 30 times faster than gather.
    """
    batch, heads, n, size = x.shape
    if n == 0 or indices.numel() == 0:
        return x.new_zeros(*indices.shape, size)
    strides = x.stride()[:3]
    unit = math.gcd(*strides) or 1
    step = strides[2] // unit
    last = (batch - 1) * strides[0] + (heads - 1) * strides[1] + (n - 1) * strides[2]
    rows = x.as_strided((last // unit + 1, size), (unit, 1))
    flat = indices.clamp_min(0)
    if step != 1:
        flat *= step
    if batch * heads > 1:
        flat += _first_rows(batch, heads, strides[0] // unit, strides[1] // unit, x.device)
    return rows.index_select(0, flat.view(-1)).view(*indices.shape, size)


@functools.lru_cache(maxsize=128)
def _first_rows(
    batch: int, heads: int, batch_step: int, head_step: int, device: torch.device
) -> Tensor:
    """int64[B, H, 1]: the row at which each head starts."""
    rows = torch.arange(batch).unsqueeze(1) * batch_step + torch.arange(heads) * head_step
    return rows.unsqueeze(-1).to(device)
