"""Attention over spans whose keys and values exist only as low-rank factors."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from . import checks
from .dispatch import Impl, use_triton
from .reference import spans as plain

RANKS = 128  # up to which the kernel's tiles of right factors fit in shared memory


def span_attention(
    q: Float[Tensor, "B Hq Q D"],
    k_left: Float[Tensor, "B Hkv N R"],
    k_right: Float[Tensor, "B Hkv S R D"],
    v_left: Float[Tensor, "B Hkv N Rv"],
    v_right: Float[Tensor, "B Hkv S Rv Dv"],
    offsets: Int64[Tensor, "*rows S1"],
    spans: Int64[Tensor, "B Hkv E"],
    *,
    longest: int,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "B Hq Q Dv"], Float32[Tensor, "B Hq Q"]]:
    """k_n = k_left_n @ k_right_s, v_n = v_left_n @ v_right_s;  attention over n of the spans s.

    offsets int64[S+1] or [B, S+1]: span s is entries offsets[s] .. offsets[s + 1] - 1 of each
    left factor, `longest` at most (short rows repeat their last offset). spans: int64[B, H_kv, E],
    the spans that are attended, -1 is skipped; the others are never read. Factors have q's dtype,
    with the singular values on either side, and are those of keys as they are attended (rotated).
    With q on CUDA they may lie in pinned host memory, which the kernel reads itself.

    Neither keys nor values are rebuilt: q k_n = k_left_n (k_right_s q), and the sum over a span's
    values is (sum_n p_n v_left_n) v_right_s. Products, softmax and sums are float32.

    All spans skipped gives zeros and lse = -inf. The kernel takes ranks up to 128; past that "auto"
    is torch on CUDA as well.

    Raises ValueError for shapes, devices, offsets, spans, longest or impl, TypeError for dtypes.
    On CUDA, where that would wait for the device, values of offsets and spans are not checked: a
    head that lists a span out of range, or one longer than `longest`, is answered with NaN.
    Source: SeKV Eqs. 6 to 8 and section 3.3.
    """
    checks.check_rank("q", q, 4)
    checks.check_float(q)
    for name, x, rank in (
        ("k_left", k_left, 4),
        ("k_right", k_right, 5),
        ("v_left", v_left, 4),
        ("v_right", v_right, 5),
    ):
        checks.check_rank(name, x, rank)
        checks.check_like(name, x, q)
    batch, heads, n, rank = k_left.shape
    checks.check_groups(q.shape[1], heads)
    count, value_rank, value_size = k_right.shape[2], v_left.shape[3], v_right.shape[4]
    checks.check_shape("k_left", k_left, (q.shape[0], heads, n, max(rank, 1)))
    checks.check_shape("k_right", k_right, (batch, heads, count, rank, q.shape[3]))
    checks.check_shape("v_left", v_left, (batch, heads, n, max(value_rank, 1)))
    checks.check_shape("v_right", v_right, (batch, heads, count, value_rank, max(value_size, 1)))
    checks.check_indices(spans, (batch, heads), count, q, name="spans")
    for name, x in (("k_right", k_right), ("v_right", v_right)):
        if x.stride(3) != x.shape[4] and x.shape[3] > 1:
            raise ValueError(
                f"{name} must have contiguous [R, D] blocks, got strides {tuple(x.stride())}"
            )
    if longest < 1:
        raise ValueError(f"longest must be at least 1, got {longest}")
    _check_offsets(offsets, batch, count, n, longest, q)
    factor = checks.resolve_scale(scale, q.shape[3])
    factors = (k_left, k_right, v_left, v_right)
    widest = max(rank, value_rank)
    if impl == "triton" and widest > RANKS:
        raise ValueError(f"impl='triton' cannot be met: ranks up to {RANKS} fit, got {widest}")
    if use_triton(impl, q) and widest <= RANKS:
        from .kernels import spans as kernel

        return kernel.span_attention(q, *factors, offsets, spans, longest, factor)
    checks.check_on_device(q, k_left=k_left, k_right=k_right, v_left=v_left, v_right=v_right)
    return plain.span_attention(q, *factors, offsets, spans, longest, factor)


def _check_offsets(
    offsets: Tensor, batch: int, count: int, n: int, longest: int, q: Tensor
) -> None:
    if offsets.dtype != torch.int64:
        raise TypeError(f"offsets must be int64, got {offsets.dtype}")
    if list(offsets.shape) not in ([count + 1], [batch, count + 1]):
        raise ValueError(
            f"offsets must have shape [{count + 1}] or [{batch}, {count + 1}], "
            f"got {list(offsets.shape)}"
        )
    if offsets.device != q.device:
        raise ValueError(f"offsets must be on q's device {q.device}, got {offsets.device}")
    if offsets.device.type != "cpu" or offsets.numel() == 0:
        return
    low, high = (int(x) for x in offsets.aminmax())
    if low < 0 or high > n:
        raise ValueError(f"offsets must lie between 0 and {n}, got {low if low < 0 else high}")
    if count:
        least, most = (int(x) for x in offsets.diff(dim=-1).aminmax())
        if least < 0 or most > longest:
            raise ValueError(
                f"offsets must bound spans of 0 to {longest} entries (longest), got "
                f"{least if least < 0 else most}"
            )
