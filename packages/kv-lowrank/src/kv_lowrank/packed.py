"""Span factors stored compactly: every span at its own rank, chosen spans taken out alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kv_lowrank._checks import check_device, check_indices, check_threshold
from kv_lowrank.spans import SpanFactors


class PackedSpans(NamedTuple):
    """Spans [B, H, S] of unequal rank r_S, without padding: r_S (|S| + D + 1) numbers each.

    The spans follow each other in the order of [B, H, S] in three tensors of one dtype: `left`
    [sum r_S |S|] holds each span's U, token after token; `sigma` [sum r_S]; `right` [sum r_S, D]
    holds V^T. `ranks`, `starts` (the first token) and `lengths` are int64[B, H, S] on the same
    device; `longest` and `rank` are the largest length and rank.
    """

    left: Tensor
    sigma: Tensor
    right: Tensor
    ranks: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int
    rank: int


def pack_spans(spans: SpanFactors, *, threshold: float = 0.0) -> PackedSpans:
    """Drop the padding, and the components whose sigma is not above `threshold`.

    After `apply_gates` the threshold is on m_i sigma_i, so that gated-out components are not
    stored. `sigma` takes the factors' dtype. Span by span the numbers are those that
    `stored_numbers` counts. Raises ValueError for a negative or NaN threshold.
    Source: SeKV section 3.2 ("components with negligible gates are dropped").
    """
    check_threshold(threshold)
    kept = spans.sigma > threshold  # [B, H, S, R]
    ranks = kept.sum(-1)
    batch, heads, count = ranks.shape
    tokens = spans.left.shape[2]
    lengths = spans.offsets.diff(dim=-1)
    # The span of each token; those before the first and after the last one get an empty row.
    token = torch.arange(tokens, device=kept.device).expand(batch, tokens).contiguous()
    owner = torch.searchsorted(spans.offsets, token, right=True)
    padded = torch.nn.functional.pad(kept, (0, 0, 1, 1))
    row = torch.arange(batch, device=kept.device)[:, None]
    mask = padded[row, :, owner].transpose(1, 2)  # [B, H, T, R]
    return PackedSpans(
        left=spans.left.masked_select(mask),
        sigma=spans.sigma.masked_select(kept).to(spans.left.dtype),
        right=spans.right[kept],
        ranks=ranks,
        starts=spans.offsets[:, None, :-1].expand(-1, heads, -1).contiguous(),
        lengths=lengths[:, None].expand(-1, heads, -1).contiguous(),
        longest=spans.longest,
        rank=int(ranks.max()) if count and batch and heads else 0,
    )


def take_spans(
    packed: PackedSpans,
    indices: Int64[Tensor, "b h e"],
    *,
    device: torch.device | str | None = None,
) -> PackedSpans:
    """Chosen spans alone: span e of the result is span `indices[..., e]`, an empty one for -1.

    Shapes: `indices` int64[B, H, E] on the device of `packed`. Only the numbers of the chosen
    spans are read, gathered into three tensors and, where `device` is given, sent there.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices, indices out of range.
    Source: SeKV section 3.2 (bases fetched for the selected spans only).
    """
    batch, heads, count = packed.ranks.shape
    check_indices("indices", indices, count)
    check_device("indices", indices, packed.ranks.device)
    if indices.ndim != 3 or indices.shape[:2] != (batch, heads):
        raise ValueError(
            f"indices must have shape {(batch, heads)} + [E], got {tuple(indices.shape)}"
        )
    absent = indices < 0
    place = indices.clamp_min(0)

    def chosen(table: Tensor) -> Tensor:
        if not count:
            return torch.zeros_like(indices)
        return table.gather(2, place).masked_fill_(absent, 0)

    ranks, lengths = chosen(packed.ranks), chosen(packed.lengths)
    components = _ragged(chosen(_before(packed.ranks)), ranks)
    sizes = packed.ranks * packed.lengths
    numbers = _ragged(chosen(_before(sizes)), ranks * lengths)
    some = indices.numel() > 0

    def sent(part: Tensor) -> Tensor:
        return part if device is None else part.to(device, non_blocking=True)

    return PackedSpans(
        left=sent(packed.left.index_select(0, numbers)),
        sigma=sent(packed.sigma.index_select(0, components)),
        right=sent(packed.right.index_select(0, components)),
        ranks=sent(ranks),
        starts=sent(chosen(packed.starts)),
        lengths=sent(lengths),
        longest=int(lengths.max()) if some else 0,
        rank=int(ranks.max()) if some else 0,
    )


def packed_rows(
    packed: PackedSpans,
) -> tuple[Float[Tensor, "b h e longest d"], Int64[Tensor, "b h e longest"]]:
    """Tokens of all spans of `packed`, rebuilt, and positions: out_t = sum_i sigma_i u_ti v_i.

    Shapes: [B, H, S, longest, D] in the factors' dtype and int64[B, H, S, longest], 0 and -1 past
    a span's end: what `span_rows` gives, for what `take_spans` took. Source: SeKV Eq. 8.
    """
    shape, device = packed.ranks.shape, packed.ranks.device
    width = packed.right.shape[-1]
    ranks, lengths = packed.ranks.flatten(), packed.lengths.flatten()
    owner, step = _members(ranks, packed.sigma.numel())
    right = packed.right.new_zeros(ranks.numel(), packed.rank, width)
    right[owner, step] = packed.right * packed.sigma[:, None]
    owner, step = _members(ranks * lengths, packed.left.numel())
    wide = ranks[owner]
    left = packed.left.new_zeros(ranks.numel(), packed.longest, packed.rank)
    left[owner, step // wide, step % wide] = packed.left
    step = torch.arange(packed.longest, device=device)
    positions = packed.starts[..., None] + step
    positions.masked_fill_(step >= packed.lengths[..., None], -1)
    return (left @ right).view(*shape, packed.longest, width), positions


def _before(sizes: Tensor) -> Tensor:
    """Where each entry of [B, H, S] begins when all are laid one after the other."""
    return (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)


def _members(sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For entries of `sizes` laid one after the other: the owner of each place, and its step."""
    every = torch.arange(sizes.numel(), device=sizes.device)
    owner = every.repeat_interleave(sizes, output_size=total)
    return owner, torch.arange(total, device=sizes.device) - _before(sizes)[owner]


def _ragged(starts: Tensor, sizes: Tensor) -> Tensor:
    """The places start, start + 1, .. of every entry, one after the other."""
    starts, sizes = starts.flatten(), sizes.flatten()
    owner, step = _members(sizes, int(sizes.sum()))
    return starts[owner] + step
