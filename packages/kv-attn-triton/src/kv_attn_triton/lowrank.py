"""Attention over keys that exist only as low-rank factors."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from . import checks
from .dispatch import Impl, use_triton
from .reference import lowrank as plain


def lowrank_attention(
    q: Float[Tensor, "B Hq Q D"],
    left: Float[Tensor, "B N r"],
    right: Float[Tensor, "B Hkv r D"],
    v: Float[Tensor, "B Hkv Nv Dv"],
    indices: Int64[Tensor, "B Hkv K"],
    cos: Float[Tensor, "Bt N Dr"],
    sin: Float[Tensor, "Bt N Dr"],
    *,
    interleaved: bool = False,
    values_gathered: bool = False,
    log_size: Float32[Tensor, "B Hkv N"] | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "B Hq Q Dv"], Float32[Tensor, "B Hq Q"]]:
    """k_n = RoPE_n(left_n @ right_h);  attention of q over n in indices, as `selected_attention`.

    q [B, H_q, Q, D] rotated already; left [B, N, r] shared by heads and right [B, H_kv, r, D] the
    factors of the keys before rotation, both of q's dtype; v [B, H_kv, N, Dv], or with
    values_gathered the picked rows [B, H_kv, K, Dv] in the order of indices (fetched from the
    host, say). cos, sin [B or 1, N, Dr]: row n is the table at entry n's original position,
    Dr <= D even; columns past Dr are not rotated. Half-split layout, as in Llama, unless
    interleaved (pairs 2i, 2i+1). The two columns of a pair hold the same number, as transformers
    makes them, and only the first need be read. The product and the rotation are rounded to q's
    dtype, as a cache would hold the keys; scores, softmax and sums are float32. The kernel keeps
    keys in registers.

    -1 in indices is skipped; an empty selection gives zeros and lse = -inf.

    Raises ValueError for shapes, devices, indices or impl, TypeError for dtypes.
    Source: ShadowKV Algorithm 2, section 4.1.
    """
    _check_factors(q, left, right)
    batch, heads = right.shape[:2]
    n = left.shape[1]
    padded = checks.check_indices(indices, (batch, heads), n, q)
    checks.check_value(v, q, (batch, heads, indices.shape[2] if values_gathered else n))
    _check_tables(q, n, cos=cos, sin=sin)
    if cos.shape != sin.shape:
        raise ValueError(f"sin must have cos's shape {list(cos.shape)}, got {list(sin.shape)}")
    if log_size is not None:
        checks.check_log_size(log_size, (batch, heads, n), q)
    factor = checks.resolve_scale(scale, q.shape[3])
    options = (interleaved, values_gathered, log_size, factor)
    if use_triton(impl, q):
        from .kernels import lowrank as kernel

        return kernel.lowrank_attention(q, left, right, v, indices, cos, sin, *options)
    checks.check_on_device(q, left=left, right=right, v=v)
    return plain.lowrank_attention(q, left, right, v, indices, cos, sin, *options, padded)


def _check_factors(q: Tensor, left: Tensor, right: Tensor) -> None:
    checks.check_rank("q", q, 4)
    checks.check_rank("left", left, 3)
    checks.check_rank("right", right, 4)
    checks.check_float(q)
    checks.check_like("left", left, q)
    checks.check_like("right", right, q)
    if left.shape[0] != q.shape[0] or left.shape[2] == 0:
        raise ValueError(f"left must have shape [{q.shape[0]}, N, r >= 1], got {list(left.shape)}")
    wanted = [q.shape[0], right.shape[1], left.shape[2], q.shape[3]]
    if list(right.shape) != wanted:
        raise ValueError(f"right must have shape {wanted}, got {list(right.shape)}")
    checks.check_groups(q.shape[1], right.shape[1])


def _check_tables(q: Tensor, n: int, **tables: Tensor) -> None:
    for name, x in tables.items():
        checks.check_rank(name, x, 3)
        if x.dtype not in (torch.float32, q.dtype):
            raise TypeError(f"{name} must be float32 or {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        width = x.shape[2]
        if x.shape[0] not in (1, q.shape[0]) or x.shape[1] != n or width % 2 or width > q.shape[3]:
            raise ValueError(
                f"{name} must have shape [1 or {q.shape[0]}, {n}, even Dr <= {q.shape[3]}], "
                f"got {list(x.shape)}"
            )
