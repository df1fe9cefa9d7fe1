"""Attention over keys rebuilt from low-rank factors, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import State, attend, pack, unpack
from .selected import forbid_padding, gather


def lowrank_attention(
    q: Tensor,
    left: Tensor,
    right: Tensor,
    v: Tensor,
    indices: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    values_gathered: bool,
    log_size: Tensor | None,
    scale: float,
    padded: bool,
) -> State:
    """See `kv_attn_triton.lowrank_attention`. Only the picked rows are read and rebuilt."""
    batch, heads = right.shape[:2]
    shared = lambda x: x.expand(batch, *x.shape[1:]).unsqueeze(1).expand(-1, heads, -1, -1)  # noqa: E731
    rows = gather(shared(left), indices)
    half = q.dtype == torch.float16 and q.device.type == "cpu"
    # torch multiplies float16 on the CPU many times slower than float32
    keys = (rows.float() @ right.float() if half else rows @ right).float()
    keys = rotate(keys, gather(shared(cos), indices), gather(shared(sin), indices), interleaved)
    keys = keys.to(q.dtype)
    values = v.clone() if values_gathered and padded else v
    values = values if values_gathered else gather(v, indices)
    bias = None if log_size is None else gather(log_size.unsqueeze(-1), indices).squeeze(-1)
    if padded:
        bias = forbid_padding(indices, bias, keys, values)
    return unpack(attend(pack(q, heads), keys, values, bias, scale), q.shape[1], q.shape[2])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """First Dr columns of float32 x turned by the tables [..., Dr]; the rest passes through."""
    size = cos.shape[-1]
    first = slice(0, size, 2) if interleaved else slice(0, size // 2)
    second = slice(1, size, 2) if interleaved else slice(size // 2, size)
    turned = torch.empty_like(x)
    turned[..., first] = x[..., first] * cos[..., first] - x[..., second] * sin[..., first]
    turned[..., second] = x[..., second] * cos[..., second] + x[..., first] * sin[..., second]
    turned[..., size:] = x[..., size:]
    return turned
