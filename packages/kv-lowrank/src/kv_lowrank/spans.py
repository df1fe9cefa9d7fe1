"""Factors of ragged spans, all spans of a length at once, with a gate for each component."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kv_lowrank._checks import (
    check_device,
    check_finite,
    check_floating,
    check_indices,
    check_offsets,
    check_positive,
    check_threshold,
)
from kv_lowrank._small_svd import small_svds

_Slab: TypeAlias = tuple[int, list[tuple[int, int]]]  # length of its spans, their (row, span)
_SLAB = 1 << 19  # numbers of x that are solved at a time: what they take beside x stays small
_ONE_EACH = Lock()  # held while torch has one thread: another call must not take that for its count


class SpanFactors(NamedTuple):
    """Spans of x [B, H, T, D], each held as U diag(sigma) V^T.

    `left` [B, H, T, R] holds the rows of every span's U, `sigma` float[B, H, S, R] falls,
    `right` [B, H, S, R, D] holds V^T; beyond a span's rank all three are 0. `offsets` is
    int64[B, S+1] on the same device and `longest` the length of the longest span.
    """

    left: Tensor
    sigma: Tensor
    right: Tensor
    offsets: Tensor
    longest: int


@torch.no_grad()
def span_svd(
    x: Float[Tensor, "b h t d"],
    offsets: Int64[Tensor, "*rows spans"],
    max_rank: int,
    *,
    dtype: torch.dtype | None = None,
) -> SpanFactors:
    """Truncated SVD of every span: x_S ~ sum_{i <= R} sigma_i u_i v_i^T, R = min(|S|, D, max_rank).

    Shapes: `x` [B, H, T, D]; `offsets` int64[S+1] from 0 to T for all rows, or [B, S+1] inside
    [0, T] (tokens outside a row's offsets are never read; short rows repeat their last offset).
    Spans of nearly the same length are solved in one batched eigenproblem of the smaller Gram
    matrix in float64, or in float32 where that is as good for factors in half precision; components
    below 1e-6 of a span's largest are held as 0. Factors in `dtype` (that of `x` unless given),
    `sigma` in float32.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices, offsets, `max_rank` < 1, NaN.
    Source: SeKV Eq. 6.
    """
    check_floating("x", x, least=4, most=4)
    batch, heads, tokens, width = x.shape
    check_offsets("offsets", offsets, batch, tokens, x.device)
    check_positive("max_rank", max_rank)
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")
    offsets = offsets.expand(batch, -1).contiguous()
    spans = offsets.shape[1] - 1
    buckets = _buckets(offsets)
    longest = int(offsets.diff(dim=-1).max()) if buckets else 0
    rank = min(max_rank, longest, width)
    dtype = x.dtype if dtype is None else dtype
    left = x.new_zeros(batch, heads, tokens, rank, dtype=dtype)
    sigma = x.new_zeros(batch, heads, spans, rank, dtype=torch.float32)
    right = x.new_empty(batch, heads, spans, rank, width, dtype=dtype)
    empty_row, empty_span = (offsets.diff(dim=-1) == 0).nonzero(as_tuple=True)
    right[empty_row, :, empty_span] = 0.0
    head = torch.arange(heads, device=x.device)[:, None]

    def solve(slab: _Slab) -> None:
        length, members = slab
        row, span = torch.tensor(members, device=x.device).unbind(1)
        token = offsets[row, span, None] + torch.arange(length, device=x.device)
        real = token < offsets[row, span + 1, None]
        place = token.clamp_max(tokens - 1)
        block = x[row[:, None, None], head, place[:, None]]  # [n, H, length, D]
        block.masked_fill_(~real[:, None, :, None], 0.0)
        check_finite("x", block)
        u, s, vh = small_svds(block.flatten(0, 1), rank, dtype)
        kept = s.shape[-1]
        u, s, vh = (part.unflatten(0, (-1, heads)) for part in (u, s, vh))
        member, step = real.nonzero(as_tuple=True)
        left[row[member], :, token[real], :kept] = u[member, :, step].to(dtype)
        sigma[row, :, span, :kept] = s.float()
        right[row, :, span, :kept] = vh.to(dtype)
        right[row, :, span, kept:] = 0.0

    _in_threads(solve, list(_slabs(buckets, heads * width)), x.device)
    return SpanFactors(left, sigma, right, offsets, longest)


def apply_gates(spans: SpanFactors, gates: Float[Tensor, "b h s r"]) -> SpanFactors:
    """Weigh each component of each span: sigma_i becomes m_i sigma_i.

    Shapes: `gates` [B, H, S, R] like `spans.sigma`, usually within (0, 1). Nothing is copied but
    sigma, and gradients reach the gates. Raises ValueError or TypeError for a wrong shape, dtype
    or device. Source: SeKV Eq. 8.
    """
    check_floating("gates", gates, least=4, most=4)
    check_device("gates", gates, spans.sigma.device)
    if gates.shape != spans.sigma.shape:
        raise ValueError(
            f"gates must have the shape of sigma {tuple(spans.sigma.shape)}, "
            f"got {tuple(gates.shape)}"
        )
    return spans._replace(sigma=spans.sigma * gates)


def span_rows(
    spans: SpanFactors, indices: Int64[Tensor, "b h e"]
) -> tuple[Float[Tensor, "b h e longest d"], Int64[Tensor, "b h e longest"]]:
    """Tokens of chosen spans, rebuilt: out_t = sum_i sigma_i u_ti v_i, and their positions.

    Shapes: `indices` int64[B, H, E] of span numbers, -1 for none; the results are
    [B, H, E, longest, D] in the factors' dtype and int64[B, H, E, longest], whose entries past a
    span's end (and all of a missing span) are 0 and -1. Only the chosen spans are read.
    Raises ValueError or TypeError as `rows` does. Source: SeKV Eq. 8.
    """
    batch, heads, count = spans.sigma.shape[:3]
    check_indices("indices", indices, count)
    check_device("indices", indices, spans.sigma.device)
    if indices.ndim != 3 or indices.shape[:2] != (batch, heads):
        raise ValueError(
            f"indices must have shape {(batch, heads)} + [E], got {tuple(indices.shape)}"
        )
    device = indices.device
    row = torch.arange(batch, device=device).view(-1, 1, 1)
    head = torch.arange(heads, device=device).view(1, -1, 1)
    span = indices.clamp_min(0)
    start, stop = spans.offsets[row, span], spans.offsets[row, span + 1]
    stop = torch.where(indices < 0, start, stop)
    token = start[..., None] + torch.arange(spans.longest, device=device)
    absent = token >= stop[..., None]
    place = token.clamp_max(spans.left.shape[2] - 1)
    coordinates = spans.left[row[..., None], head[..., None], place]  # [B, H, E, longest, R]
    scaled = coordinates * spans.sigma[row, head, span, None].to(coordinates.dtype)
    rebuilt = scaled @ spans.right[row, head, span]
    return rebuilt.masked_fill(absent[..., None], 0.0), token.masked_fill(absent, -1)


def stored_numbers(spans: SpanFactors, *, threshold: float = 0.0) -> Int64[Tensor, "b h s"]:
    """Numbers that each span's kept components take: r_S (|S| + D + 1), r_S of sigma > threshold.

    Shapes: int64[B, H, S]. `threshold` is not negative; after `apply_gates` it is on m_i sigma_i.
    Raises ValueError for a negative threshold. Source: SeKV section 3.2 and Eq. 18.
    """
    check_threshold(threshold)
    kept = (spans.sigma > threshold).sum(-1)
    return kept * (spans.offsets.diff(dim=-1)[:, None] + spans.right.shape[-1] + 1)


def _in_threads(call: Callable[[_Slab], None], slabs: list[_Slab], device: torch.device) -> None:
    """`call` for each of `slabs`, on a CPU in as many threads as torch has, each with one slab.

    LAPACK solves the problems of a batch one after the other, and takes longer where it shares out
    each of them, small as they are: so torch has one thread in each of ours.
    """
    threads = min(torch.get_num_threads(), len(slabs)) if device.type == "cpu" else 1
    if threads < 2:
        for slab in slabs:
            call(slab)
        return
    inference = torch.is_inference_mode_enabled()

    def run(slab: _Slab) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            call(slab)

    with _ONE_EACH:
        all_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(run, slabs))  # raises what a slab raised
        finally:
            torch.set_num_threads(all_threads)


def _buckets(offsets: Tensor) -> dict[int, list[tuple[int, int]]]:
    """(row, span) of every span that is not empty, by its length rounded up by at most an eighth:
    shorter spans get rows of zeros, which leave a decomposition as it is."""
    buckets = defaultdict(list)
    for row, lengths in enumerate(offsets.diff(dim=-1).tolist()):
        for span, length in enumerate(lengths):
            step = max(1, 1 << (length.bit_length() - 4) if length.bit_length() > 4 else 1)
            if length:
                buckets[-(-length // step) * step].append((row, span))
    return dict(buckets)


def _slabs(buckets: dict[int, list[tuple[int, int]]], row_numbers: int) -> Iterator[_Slab]:
    """The buckets in parts of about `_SLAB` numbers, `row_numbers` to a token."""
    for length, members in buckets.items():
        count = max(1, _SLAB // max(1, length * row_numbers))
        for start in range(0, len(members), count):
            yield length, members[start : start + count]
