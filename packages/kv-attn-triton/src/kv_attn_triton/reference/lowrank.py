"""Attention over keys rebuilt from low-rank factors, in plain torch.

A few tokens of all heads at a time are rebuilt, turned and scored while they are in the cache; the
values follow in the same way. Neither keys nor picked values are ever held for all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import State, pack, unpack, weigh
from .selected import gather

ROWS = 1024  # rows per thread that are rebuilt at a time


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
    rows = pack(q, heads).float() * scale
    out = q.new_zeros(batch, heads, rows.shape[2], v.shape[3])
    lse = q.new_full(out.shape[:3], -torch.inf, dtype=torch.float32)
    if left.shape[1] == 0 or indices.numel() == 0:
        return unpack((out, lse), q.shape[1], q.shape[2])
    for b in range(batch):
        turn = b if cos.shape[0] > 1 else 0
        tables = (per_pair(cos[turn], interleaved), per_pair(sin[turn], interleaved))
        factors = (left[b], right[b], *tables, interleaved)
        bias = None if log_size is None else log_size[b]
        state = _attend(rows[b], factors, v[b], indices[b], values_gathered, bias, padded)
        out[b], lse[b] = state
    return unpack((out, lse), q.shape[1], q.shape[2])


def _attend(
    rows: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor, bool],
    v: Tensor,
    picked: Tensor,
    values_gathered: bool,
    log_size: Tensor | None,
    padded: bool,
) -> State:
    """Scaled packed rows float32[H, R, D] of one row of the batch over picked [H, K]."""
    heads, count = picked.shape
    place = picked.clamp_min(0) if padded else picked
    step = max(1, ROWS * torch.get_num_threads() // heads)
    tiles = [slice(i, i + step) for i in range(0, count, step)]

    scores = rows.new_empty(heads, rows.shape[1], count)
    for t in tiles:
        scores[..., t] = rows @ rebuild(place[:, t], *factors).mT
    if log_size is not None:
        scores += log_size.gather(1, place).unsqueeze(1)
    skipped = picked < 0 if padded else None
    if skipped is not None:
        scores.masked_fill_(skipped.unsqueeze(1), -torch.inf)

    def times(p: Tensor) -> Tensor:
        summed = p.new_zeros(heads, p.shape[1], v.shape[2])
        for t in tiles:
            values = v[:, t] if values_gathered else gather(v.unsqueeze(0), place[None, :, t])[0]
            values = values.float()
            if skipped is not None:  # what -1 fetched may be NaN
                values = values.masked_fill(skipped[:, t].unsqueeze(-1), 0.0)
            summed.baddbmm_(p[..., t], values)
        return summed

    return weigh(scores, times)


def per_pair(table: Tensor, interleaved: bool) -> Tensor:
    """One column per pair of a table [N, Dr]: [N, Dr / 2]."""
    return table[:, ::2] if interleaved else table[:, : table.shape[1] // 2]


def take(x: Tensor, place: Tensor) -> Tensor:
    """x [N, ..], place [H, K] -> x[place] [H, K, ..]."""
    return x.index_select(0, place.reshape(-1)).view(*place.shape, x.shape[1])


def rebuild(
    place: Tensor, left: Tensor, right: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """RoPE(left[place] @ right) as float32[H, K, D], rounded to right's dtype after each step.

    left [N, r], right [H, r, D], tables [N, Dr / 2], place [H, K].
    """
    rows = take(left, place)
    # torch multiplies float16 on the CPU many times slower than float32
    half = right.dtype == torch.float16 and right.device.type == "cpu"
    keys = torch.bmm(rows.float(), right.float()) if half else torch.bmm(rows, right)
    turned = keys.to(right.dtype).float()
    rotate(turned, take(cos, place), take(sin, place), interleaved)
    return turned if right.dtype == torch.float32 else turned.to(right.dtype).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turns the first columns of float32 x, in place, by tables [..., Dr / 2]: one per pair."""
    pairs = cos.shape[-1]
    a = x[..., 0 : 2 * pairs : 2] if interleaved else x[..., :pairs]
    b = x[..., 1 : 2 * pairs : 2] if interleaved else x[..., pairs : 2 * pairs]
    crossed = a * sin
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).add_(crossed)
