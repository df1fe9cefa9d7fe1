"""Attention over a ragged cache: lists of unequal length, packed without padding."""

from __future__ import annotations

from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from . import checks
from .dispatch import Impl, use_triton
from .reference import ragged as plain


def ragged_attention(
    q: Float[Tensor, "B Hq Q D"],
    k: Float[Tensor, "N D"],
    v: Float[Tensor, "N Dv"],
    starts: Int64[Tensor, "B Hkv"],
    lengths: Int32[Tensor, "B Hkv"],
    *,
    log_size: Float32[Tensor, " N"] | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "B Hq Q Dv"], Float32[Tensor, "B Hq Q"]]:
    """`attention` where the list of row b and KV head h is entries starts[b, h] .. + lengths[b, h].

    q [B, H_q, Q, D], k [N, D], v [N, Dv] of one dtype (float32, bfloat16 or float16), log_size
    float32[N] or None, starts int64[B, H_kv], lengths int32[B, H_kv]. Lists may lie anywhere, in
    any order, and overlap (beams that share a prompt). All Q queries see the whole list. An empty
    list gives zeros and lse = -inf.

    Raises as `attention` does, and ValueError for a list that leaves the N entries (on CUDA, where
    that would wait for the device, its result is NaN).
    """
    checks.check_rank("q", q, 4)
    checks.check_float(q)
    for name, x in (("k", k), ("v", v)):
        checks.check_rank(name, x, 2)
        checks.check_like(name, x, q)
    if k.shape[1] != q.shape[3] or q.shape[3] == 0:
        raise ValueError(
            f"k must have q's head size, at least 1; got {k.shape[1]} for q's {q.shape[3]}"
        )
    if v.shape[0] != k.shape[0] or v.shape[1] == 0:
        raise ValueError(f"v must have shape [{k.shape[0]}, Dv >= 1], got {tuple(v.shape)}")
    checks.check_lists(starts, lengths, k.shape[0], q)
    if log_size is not None:
        checks.check_log_size(log_size, (k.shape[0],), q)
    factor = checks.resolve_scale(scale, q.shape[3])
    if use_triton(impl, q):
        from .kernels import attention as kernel

        return kernel.ragged_attention(q, k, v, starts, lengths, log_size, factor)
    checks.check_on_device(q, k=k, v=v)
    return plain.ragged_attention(q, k, v, starts, lengths, log_size, factor)
