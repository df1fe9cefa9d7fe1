"""Attention over keys rebuilt from low-rank factors, in plain torch.

A block of heads at a time is rebuilt, turned and attended, while its keys are in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import State, attend, blocks, pack, unpack
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
    batch, heads, _, size = right.shape
    rows = pack(q, heads)
    out = q.new_zeros(batch, heads, rows.shape[2], v.shape[3])
    lse = q.new_full(out.shape[:3], -torch.inf, dtype=torch.float32)
    if left.shape[1] == 0 or indices.numel() == 0:
        return unpack((out, lse), q.shape[1], q.shape[2])
    for some in blocks(batch, heads, indices.shape[2] * size):
        b, picked = some[0].start, indices[some]
        place = (picked.clamp_min(0) if padded else picked)[0]
        turn = b if cos.shape[0] > 1 else 0
        c, s = (per_pair(x[turn], place, interleaved) for x in (cos, sin))
        keys = rebuild(take(left[b], place), right[b, some[1]], c, s, interleaved).unsqueeze(0)
        values = v[some] if values_gathered else gather(v[some], picked)
        bias = None
        if log_size is not None:
            bias = gather(log_size[some].unsqueeze(-1), picked).squeeze(-1)
        if padded:
            values = values.clone() if values_gathered else values
            bias = forbid_padding(picked, bias, keys, values)
        out[some], lse[some] = attend(rows[some], keys, values, bias, scale)
    return unpack((out, lse), q.shape[1], q.shape[2])


def take(x: Tensor, place: Tensor) -> Tensor:
    """x [N, ..], place [H, K] -> x[place] [H, K, ..]."""
    return x.index_select(0, place.reshape(-1)).view(*place.shape, x.shape[1])


def per_pair(table: Tensor, place: Tensor, interleaved: bool) -> Tensor:
    """Rows of a table [N, Dr], one column per pair: [H, K, Dr / 2]."""
    if interleaved:
        return take(table, place)[..., ::2]
    return take(table[:, : table.shape[1] // 2], place)


def rebuild(rows: Tensor, right: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE(rows [H, K, r] @ right [H, r, D]), rounded to right's dtype after each step."""
    # torch multiplies float16 on the CPU many times slower than float32
    half = right.dtype == torch.float16 and right.device.type == "cpu"
    keys = (torch.bmm(rows.float(), right.float()) if half else torch.bmm(rows, right)).float()
    rotate(keys, cos, sin, interleaved)
    return keys.to(right.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turns the first columns of float32 x, in place, by tables [..., Dr / 2]: one per pair."""
    pairs = cos.shape[-1]
    a = x[..., 0 : 2 * pairs : 2] if interleaved else x[..., :pairs]
    b = x[..., 1 : 2 * pairs : 2] if interleaved else x[..., pairs : 2 * pairs]
    crossed = a * sin
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).add_(crossed)
