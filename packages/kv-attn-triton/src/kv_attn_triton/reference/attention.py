"""Attention in plain torch, packed: the queries of a KV head's group are rows of one matrix.

Two routes give (out, lse):

`_flash`, torch's fused CPU kernel, which returns lse and takes the packed rows, strided keys and
a float32 bias broadcast over rows. `_matmul`, two matrix products in float32 around a softmax.

Times on one core of an EPYC with AVX-512 (8 KV heads of D = 128, float32, keys not in the cache):

    rows    N = 1,024          N = 16,384         (flash / matmul)
    4       0.47 / 0.32 ms     19 / 13 ms
    8       0.64 / 1.08 ms     22 / 20 ms
    16      1.12 / 1.37 ms     27 / 30 ms
    32      2.25 / 2.69 ms     39 / 54 ms

bfloat16 at D = 128, four rows: 0.56 / 0.68 ms for 1,000 entries, 97 / 96 ms for 131,072. So flash,
except for few float32 rows over keys that leave the cache. float16, which the fused kernel runs
five times slower than bfloat16, always takes `_matmul`.

Both routes hand out work by KV head. Where that leaves threads without any, the keys of each head
are cut into pieces, which are attended as if they were heads and merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from ..merge import FLOOR, merge_states

State = tuple[Tensor, Tensor]

FLASH = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)
CONVERTED = 1 << 19  # elements per thread converted to float32 at a time: stays in the cache
SCORES = 1 << 24  # float32 scores held at a time
LONG = 1 << 18  # float32 elements of one head's keys past which `_matmul` is the faster one
FEW = 8  # rows up to which that holds
PIECE = 1024  # entries that are worth a thread of their own
SQUARE = 64  # causal queries whose own entries are one masked product for the whole group


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
    _, query_heads, queries, _ = q.shape
    packed = pack(q, k.shape[1])
    rows = queries if causal else 1
    if lengths is not None:
        state = _ragged(packed, k, v, log_size, lengths, scale, rows)
    elif rows > 1:
        state = _causal(packed, k, v, log_size, scale, rows)
    else:
        state = attend(packed, k, v, log_size, scale)
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
    return (
        out.reshape(batch, query_heads, queries, size),
        lse.reshape(batch, query_heads, queries),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> State:
    """Packed rows q [B, H, R, D] over every entry of k, v, with bias [B, H, N] added."""
    if torch.get_num_threads() > 1:
        pieces = _pieces(q, k, v)
        if pieces > 1:
            return _spread(q, k, v, bias, scale, pieces)
    return _route(q, k, v, bias, scale, causal=False)


def _pieces(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Into how many pieces each head's keys are cut so that all threads have equal work."""
    threads, heads = torch.get_num_threads(), q.shape[0] * q.shape[1]
    if heads == 0 or q.device.type != "cpu" or not (folds(k) and folds(v)):
        return 1
    # with many heads per thread, a last round in which some wait is cheaper than merging
    wanted = threads // math.gcd(threads, heads) if heads < 4 * threads else 1
    return max(1, min(wanted, k.shape[2] // PIECE))


def _spread(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, pieces: int
) -> State:
    """Pieces of n // pieces entries, attended as heads of their own; the rest apart; merged."""
    batch, heads, rows, size = q.shape
    n = k.shape[2]
    even = n // pieces * pieces

    def cut(x: Tensor) -> Tensor:
        step = x.stride(1) if heads > 1 else x.stride(0)
        strides = (step, n // pieces * x.stride(2), x.stride(2), x.stride(3))
        return x.as_strided((batch * heads, pieces, n // pieces, x.shape[3]), strides)

    each = None if bias is None else bias[:, :, :even].reshape(batch * heads, pieces, -1)
    shared = q.reshape(batch * heads, 1, rows, size).expand(-1, pieces, -1, -1)
    out, lse = _route(shared, cut(k), cut(v), each, scale, causal=False)
    parts = [
        (o.view(batch, heads, rows, -1), x.view(batch, heads, rows))
        for o, x in zip(out.unbind(1), lse.unbind(1), strict=True)
    ]
    if even < n:
        last = None if bias is None else bias[:, :, even:]
        parts.append(_route(q, k[:, :, even:], v[:, :, even:], last, scale, causal=False))
    return merge_states(parts)


def _route(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> State:
    """`causal`: as many rows as entries, row i sees entries 0..i."""
    if q.numel() == 0 or k.shape[2] == 0:
        return _empty(q, v.shape[3])
    if _fused(q, k, v):
        return _flash(q, k, v, bias, scale, causal)
    return _matmul(q, k, v, bias, scale, q.shape[2] if causal else 1)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's fused kernel takes these and is the faster route."""
    _, _, rows, size = q.shape
    dtype = q.dtype
    if FLASH is None or not q.is_cpu or dtype == torch.float16 or v.shape[3] != size:
        return False
    return dtype != torch.float32 or rows > FEW or k.shape[2] * size < LONG


def _empty(q: Tensor, value_size: int) -> State:
    out = q.new_zeros(*q.shape[:3], value_size)
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> State:
    """torch's fused kernel."""
    mask = None if bias is None else bias.unsqueeze(2)
    out, lse = FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)  # type: ignore[misc]
    if bias is not None and bool((lse == 0).any()):
        # the kernel answers a row whose every entry is forbidden with lse = 0
        highest = bias.cummax(-1).values if causal else bias.amax(-1, keepdim=True)
        lse = lse.masked_fill(highest == -torch.inf, -torch.inf)
    return out, lse


def _matmul(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, queries: int
) -> State:
    """scores = q k^T * scale + bias, softmax, times v: in float32, a block of rows at a time.

    Row g*queries + j sees entries up to N - queries + j; all of them if there is one query.
    """
    batch, heads, rows, _ = q.shape
    n = k.shape[2]
    if batch > 1 and not (folds(k) and folds(v)):
        # matmul would copy all keys to fold batch and heads into one dimension
        parts = [
            _matmul(
                q[b : b + 1],
                k[b : b + 1],
                v[b : b + 1],
                None if bias is None else bias[b : b + 1],
                scale,
                queries,
            )
            for b in range(batch)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    out = q.new_empty(batch, heads, rows, v.shape[3])
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
    block = max(1, SCORES // (batch * heads * n))

    def times(p: Tensor) -> Tensor:
        first, *others = tiles(v)
        summed = p[..., first] @ v[:, :, first].float()
        for t in others:
            summed += p[..., t] @ v[:, :, t].float()
        return summed

    for start in range(0, rows, block):
        some = q[:, :, start : start + block].float() * scale
        x = products(some, k).contiguous()
        if bias is not None:
            x += bias.unsqueeze(2)
        if queries > 1:
            past = max(n - queries, 0)
            row = torch.arange(start, start + x.shape[2], device=q.device) % queries
            later = torch.arange(past, n, device=q.device) > (n - queries + row).unsqueeze(-1)
            x[..., past:].masked_fill_(later, -torch.inf)
        part, lse[:, :, start : start + block] = weigh(x, times)
        out[:, :, start : start + block] = part
    return out, lse


def weigh(x: Tensor, times: Callable[[Tensor], Tensor]) -> State:
    """softmax of scores x [.., R, N], which are overwritten, times values; and their lse.

    times: what multiplies numbers [.., R, N] by the values -> [.., R, Dv].
    """
    peak = x.amax(-1, keepdim=True).clamp_min_(FLOOR)
    x.sub_(peak).exp_()
    total = x.sum(-1, keepdim=True)
    lse = (peak + total.log()).squeeze(-1)
    # total is at least 1 (the peak's own term), or 0 in a row with nothing to attend
    return times(x).div_(total.clamp_min_(1.0)), lse


def products(rows: Tensor, keys: Tensor) -> Tensor:
    """float32 rows [B, H, R, D] times keys [B, H, n, D] of any dtype: float32[B, H, R, n].

    float32 keys come from memory and are read in order by keys times rows, twice as fast as the
    reverse; keys just converted lie in the cache, where the reverse is the faster one.
    """
    if keys.dtype == torch.float32:
        return (keys @ rows.mT).mT
    x = rows.new_empty(*rows.shape[:3], keys.shape[2])
    for t in tiles(keys):
        x[..., t] = rows @ keys[:, :, t].float().mT
    return x


def tiles(x: Tensor) -> list[slice]:
    """Runs of entries of x [B, H, N, D], one at least, that are converted to float32 at a time."""
    step = x.shape[2]
    if x.dtype != torch.float32:
        each = x.shape[0] * x.shape[1] * x.shape[3]
        step = torch.get_num_threads() * CONVERTED // max(1, each)
    step = max(1, step)
    return [slice(i, i + step) for i in range(0, max(1, x.shape[2]), step)]


def folds(x: Tensor) -> bool:
    """Whether batch and heads are one dimension in memory."""
    return x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, queries: int
) -> State:
    """The last `queries` entries are the queries' own; query j sees entries up to N - Q + j.

    For the fused kernel all earlier entries are one call without a mask, and the square of own
    entries another: no mask as wide as the keys, no repeated heads.
    """
    if queries == 1:
        return attend(q, k, v, bias, scale)
    if q.numel() == 0 or k.shape[2] == 0:
        return _empty(q, v.shape[3])
    fused = _fused(q, k, v)
    square = _square if fused and queries > SQUARE else _matmul
    past = max(k.shape[2] - queries, 0) if fused else 0
    if past == 0:
        return square(q, k, v, bias, scale, queries)
    before, own = (None, None) if bias is None else (bias[:, :, :past], bias[:, :, past:])
    parts = [
        attend(q, k[:, :, :past], v[:, :, :past], before, scale),
        square(q, k[:, :, past:], v[:, :, past:], own, scale, queries),
    ]
    return merge_states(parts)


def _square(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, queries: int
) -> State:
    """Many queries over their own entries: one causal call per query head of the group."""
    own = k.shape[2]
    batch, heads, rows, _ = q.shape
    group = rows // queries
    out, lse = _empty(q, v.shape[3])
    last = slice(queries - own, None)
    head_out = out.view(batch, heads, group, queries, -1)[:, :, :, last]
    head_lse = lse.view(batch, heads, group, queries)[:, :, :, last]
    head_q = q.view(batch, heads, group, queries, -1)[:, :, :, last]
    for g in range(group):
        head_out[:, :, g], head_lse[:, :, g] = _route(
            head_q[:, :, g], k, v, bias, scale, causal=True
        )
    return out, lse


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
