"""Attention over spans held as low-rank factors, in plain torch, without rebuilding a row."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import State, blocks, pack, unpack, weigh
from .selected import gather


def span_attention(
    q: Tensor,
    k_left: Tensor,
    k_right: Tensor,
    v_left: Tensor,
    v_right: Tensor,
    offsets: Tensor,
    spans: Tensor,
    longest: int,
    scale: float,
    padded: bool,
) -> State:
    """See `kv_attn_triton.span_attention`."""
    batch, heads, n, rank = k_left.shape
    rows = pack(q, heads).float() * scale
    out = q.new_zeros(*rows.shape[:3], v_right.shape[4])
    lse = q.new_full(rows.shape[:3], -torch.inf, dtype=torch.float32)
    if n == 0 or k_right.shape[2] == 0 or spans.numel() == 0:
        return unpack((out, lse), q.shape[1], q.shape[2])
    bounds = offsets.expand(batch, -1)
    each = spans.shape[2] * rank * (longest + k_right.shape[4])
    for some in blocks(batch, heads, each):
        factors = (k_left[some], k_right[some], v_left[some], v_right[some])
        state = _attend(rows[some], *factors, bounds[some[0]], spans[some], longest, padded)
        out[some], lse[some] = state
    return unpack((out, lse), q.shape[1], q.shape[2])


def _attend(
    rows: Tensor,
    k_left: Tensor,
    k_right: Tensor,
    v_left: Tensor,
    v_right: Tensor,
    bounds: Tensor,
    spans: Tensor,
    longest: int,
    padded: bool,
) -> State:
    """Scaled packed rows over a block of heads; spans padded to the longest, for one product."""
    batch, heads, count, size = rows.shape
    chosen = spans.shape[2]
    units = batch * heads * chosen
    token, absent, void = _tokens(bounds, spans, longest)

    right = gather(k_right.flatten(3), spans).float().view(batch, heads, -1, size)
    turned = (right @ rows.mT).view(units, -1, count)  # [.., R, G*Q]
    left = gather(k_left, token).float().view(units, longest, -1)
    scores = (turned.mT @ left.mT).view(batch, heads, chosen, count, longest)
    scores = scores.transpose(2, 3).reshape(batch, heads, count, -1)
    scores.masked_fill_(absent.unsqueeze(2), -torch.inf)

    left = gather(v_left, token).view(units, longest, -1)
    right = gather(v_right.flatten(3), spans)
    if padded or bool(void.any()):
        left.masked_fill_(void.view(units, 1, 1), 0.0)
        right.masked_fill_(void, 0.0)

    def values(p: Tensor) -> Tensor:
        by_span = p.view(batch, heads, count, chosen, longest).transpose(2, 3)
        inner = by_span.reshape(units, count, longest) @ left.float()  # [.., G*Q, Rv]
        inner = inner.view(batch, heads, chosen, count, -1).transpose(2, 3)
        wide = right.float().view(batch, heads, -1, v_right.shape[4])
        return inner.reshape(batch, heads, count, -1) @ wide

    return weigh(scores, values)


def _tokens(bounds: Tensor, spans: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of each span, int64[B, H, E * longest], the last one repeated past the span's end;
    which of these are repeats; and which spans have none, bool[B, H, E, 1]."""
    bounds = bounds.unsqueeze(1).expand(-1, spans.shape[1], -1)
    place = spans.clamp_min(0)
    start, stop = (bounds.gather(2, x).unsqueeze(-1) for x in (place, place + 1))
    stop = torch.where(spans.unsqueeze(-1) < 0, start, stop)
    token = start + torch.arange(longest, device=spans.device)
    absent = token >= stop
    return token.minimum(stop - 1).flatten(2), absent.flatten(2), start >= stop
