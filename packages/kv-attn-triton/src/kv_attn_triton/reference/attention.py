"""Attention in plain torch, packed: the queries of a KV head's group are rows of one matrix.

Two routes give (out, lse):

`_flash`, torch's fused CPU kernel, which returns lse and takes the packed rows, strided keys and
a float32 bias broadcast over rows. `_matmul`, two matrix products in float32 around a softmax.

Times on one core of an EPYC with AVX-512 (8 KV heads, 4 query heads each, one query):

    D    N        float32 flash / matmul    bfloat16 flash / matmul
    64   1,000    0.22 / 0.36 ms            0.30 / 0.38 ms
    64   131,072  78 / 71 ms                51 / 48 ms
    128  1,000    0.42 / 0.57 ms            0.56 / 0.68 ms
    128  4,096    3.6 / 3.0 ms              3.0 / 2.8 ms
    128  131,072  147 / 99 ms               97 / 96 ms

So flash, except for few float32 rows over keys that leave the cache. float16, which the fused
kernel runs five times slower than bfloat16, always takes `_matmul`.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from ..merge import FLOOR, merge_states

State = tuple[Tensor, Tensor]

FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
TILE = 2048  # keys converted to float32 at a time: stays in the L2 cache
SCORES = 1 << 24  # float32 scores held at a time
LONG = 1 << 19  # float32 elements of one head's keys past which `_matmul` is the faster one


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_size: Tensor | None,
    lengths: Tensor | None,
    causal: bool,
    scale: float,
) -> State:
    """See `kv_attn_triton.attention`. Each run of heads of equal length is one call."""
    query_heads, queries = q.shape[1:3]
    packed = pack(q, k.shape[1])
    if lengths is None:
        state = _causal(packed, k, v, log_size, scale, queries if causal else 1)
    else:
        state = _ragged(packed, k, v, log_size, lengths, scale, queries if causal else 1)
    return unpack(state, query_heads, queries)


def pack(q: Tensor, key_heads: int) -> Tensor:
    """[B, H_q, Q, D] -> [B, H_kv, G*Q, D]: row g*Q + j is query j of the group's head g."""
    batch, query_heads, queries, size = q.shape
    if q.stride(-1) != 1:
        q = q.contiguous()
    return q.reshape(batch, key_heads, query_heads // key_heads * queries, size)


def unpack(state: State, query_heads: int, queries: int) -> State:
    out, lse = state
    batch, _, _, size = out.shape
    shape = (batch, query_heads, queries)
    return out.reshape(*shape, size), lse.reshape(shape)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> State:
    """Packed rows q [B, H, R, D] over every entry of k, v, with bias [B, H, N] added."""
    return _route(q, k, v, bias, scale, causal=False)


def _route(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> State:
    rows, size = q.shape[2:]
    if q.numel() == 0 or k.shape[2] == 0:
        return _empty(q, v.shape[3])
    long = q.dtype == torch.float32 and rows <= 16 and k.shape[2] * size >= LONG
    fused = FLASH is not None and q.device.type == "cpu" and q.dtype != torch.float16
    if fused and v.shape[3] == size and (causal or not long):
        return _flash(q, k, v, bias, scale, causal)
    return _matmul(q, k, v, bias, scale, causal)


def _empty(q: Tensor, value_size: int) -> State:
    out = q.new_zeros(*q.shape[:3], value_size)
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> State:
    """torch's fused kernel. `causal`: as many rows as entries, row i sees entries 0..i."""
    mask = None if bias is None else bias.unsqueeze(2)
    out, lse = FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)  # type: ignore[misc]
    if bias is not None and bool((lse == 0).any()):
        # the kernel answers a row whose every entry is forbidden with lse = 0
        highest = bias.cummax(-1).values if causal else bias.amax(-1, keepdim=True)
        lse = lse.masked_fill(highest == -torch.inf, -torch.inf)
    return out, lse


def _matmul(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> State:
    """scores = q k^T * scale + bias, softmax, times v: in float32, a block of rows at a time."""
    batch, heads, rows, _ = q.shape
    n = k.shape[2]
    if batch > 1 and not (_folds(k) and _folds(v)):
        # matmul would copy all keys to fold batch and heads into one dimension
        parts = [
            _matmul(
                q[b : b + 1],
                k[b : b + 1],
                v[b : b + 1],
                None if bias is None else bias[b : b + 1],
                scale,
                causal,
            )
            for b in range(batch)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    out = q.new_empty(batch, heads, rows, v.shape[3])
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
    tile = n if k.dtype == torch.float32 else TILE
    block = max(1, SCORES // (batch * heads * n))
    for start in range(0, rows, block):
        some = q[:, :, start : start + block].float() * scale
        x = some.new_empty(batch, heads, some.shape[2], n)
        for i in range(0, n, tile):
            x[..., i : i + tile] = products(some, k[:, :, i : i + tile])
        if bias is not None:
            x += bias.unsqueeze(2)
        if causal:
            row = torch.arange(start, start + x.shape[2], device=q.device)
            later = torch.arange(n, device=q.device) > row.unsqueeze(-1)
            x.masked_fill_(later, -torch.inf)
        peak = x.amax(-1, keepdim=True).clamp_min_(FLOOR)
        x.sub_(peak).exp_()
        total = x.sum(-1, keepdim=True)
        lse[:, :, start : start + block] = (peak + total.log()).squeeze(-1)
        summed = x[..., :tile] @ v[:, :, :tile].float()
        for i in range(tile, n, tile):
            summed += x[..., i : i + tile] @ v[:, :, i : i + tile].float()
        # total is at least 1 (the peak's own term), or 0 in a row with nothing to attend
        out[:, :, start : start + block] = summed.div_(total.clamp_min_(1.0))
    return out, lse


def products(rows: Tensor, keys: Tensor) -> Tensor:
    """float32 rows [.., R, D] times keys [.., n, D] of any dtype: float32[.., R, n].

    float32 keys come from memory and are read in order by keys times rows, twice as fast as the
    reverse; keys just converted lie in the cache, where the reverse is the faster one.
    """
    if keys.dtype == torch.float32:
        return (keys @ rows.transpose(-1, -2)).transpose(-1, -2)
    return rows @ keys.float().transpose(-1, -2)


def _folds(x: Tensor) -> bool:
    return x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, queries: int
) -> State:
    """The last `queries` entries are the queries' own; query j sees entries up to N - Q + j.

    All earlier entries are one call without a mask, the square of own entries one causal call per
    query head of the group, which reads keys in place: no mask as wide as the keys, no repeated
    heads.
    """
    if queries == 1:
        return attend(q, k, v, bias, scale)
    past = max(k.shape[2] - queries, 0)
    own = k.shape[2] - past
    batch, heads, rows, _ = q.shape
    group = rows // queries
    out, lse = _empty(q, v.shape[3])
    head_out = out.view(batch, heads, group, queries, -1)[:, :, :, queries - own :]
    head_lse = lse.view(batch, heads, group, queries)[:, :, :, queries - own :]
    head_q = q.view(batch, heads, group, queries, -1)[:, :, :, queries - own :]
    square = (k[:, :, past:], v[:, :, past:], None if bias is None else bias[:, :, past:])
    for g in range(group):
        head_out[:, :, g], head_lse[:, :, g] = _route(head_q[:, :, g], *square, scale, causal=True)
    if past == 0:
        return out, lse
    before = None if bias is None else bias[:, :, :past]
    earlier = attend(q, k[:, :, :past], v[:, :, :past], before, scale)
    return merge_states([earlier, (out, lse)])


def _ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Tensor,
    scale: float,
    queries: int,
) -> State:
    """One call over all heads when their lengths agree, else one per run of equal heads."""
    table = lengths.tolist()
    distinct = {n for row in table for n in row}
    if len(distinct) == 1:
        n = distinct.pop()
        cut = None if bias is None else bias[:, :, :n]
        return _causal(q, k[:, :, :n], v[:, :, :n], cut, scale, queries)
    out, lse = _empty(q, v.shape[3])
    for b, row in enumerate(table):
        head = 0
        for n, same in groupby(row):
            run = (slice(b, b + 1), slice(head, head + len(list(same))))
            head = run[1].stop
            cut = None if bias is None else bias[run][:, :, :n]
            out[run], lse[run] = _causal(
                q[run], k[run][:, :, :n], v[run][:, :, :n], cut, scale, queries
            )
    return out, lse
