"""Attention over all entries of a cache, or over those picked by index."""

from __future__ import annotations

from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from . import checks
from .dispatch import Impl, use_triton
from .reference import attention as plain
from .reference import selected as plain_selected


def attention(
    q: Float[Tensor, "B Hq Q D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N Dv"],
    *,
    log_size: Float32[Tensor, "B Hkv N"] | None = None,
    lengths: Int32[Tensor, "B Hkv"] | None = None,
    causal: bool = False,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "B Hq Q Dv"], Float32[Tensor, "B Hq Q"]]:
    """s_n = scale q.k_n + log_size_n;  lse = log sum_n exp(s_n);  out = sum_n exp(s_n - lse) v_n.

    q [B, H_q, Q, D], k [B, H_kv, N, D], v [B, H_kv, N, Dv] of one dtype (float32, bfloat16 or
    float16); query head h reads KV head h // (H_q // H_kv). Scores, softmax and sums are float32;
    out has q's dtype, lse is float32 and natural. k and v may be strided views of larger buffers
    as long as the last dimension is contiguous.

    log_size: float32, the log of how many tokens an entry stands for; -inf forbids an entry.
    lengths: int32, entries past a head's length are never read.
    causal: the Q queries are the last Q entries of each head's list, so that query j sees entries
        0 .. length - Q + j.
    scale: 1/sqrt(D) unless told.
    impl: "auto" is Triton for CUDA tensors where triton is installed and torch elsewhere. The
        kernels multiply float32 as three TF32 products, within 2**-22 of each exact product.

    A query with nothing to attend gets zeros and lse = -inf. On CUDA, lengths out of range are
    not checked (that would wait for the device) but answered with NaN.

    Raises ValueError for shapes, devices, lengths or an impl that cannot be met, TypeError for
    dtypes. Source: SemantiCache Eq. 4 for log_size; flash-decoding for the split over keys.
    """
    checks.check_entries(q, k, v)
    if log_size is not None:
        checks.check_log_size(log_size, tuple(k.shape[:3]), q)
    if lengths is not None:
        checks.check_lengths(lengths, k, q)
    factor = checks.resolve_scale(scale, q.shape[3])
    if use_triton(impl, q):
        from .kernels import attention as kernel

        return kernel.attention(q, k, v, log_size, lengths, None, causal, factor)
    checks.check_on_device(q, k=k, v=v)
    return plain.attention(q, k, v, log_size, lengths, causal, factor)


def selected_attention(
    q: Float[Tensor, "B Hq Q D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N Dv"],
    indices: Int64[Tensor, "B Hkv K"],
    *,
    log_size: Float32[Tensor, "B Hkv N"] | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "B Hq Q Dv"], Float32[Tensor, "B Hq Q"]]:
    """`attention` over the entries k[indices], v[indices] of each KV head.

    indices: int64[B, H_kv, K], -1 is skipped wherever it stands; an index given twice counts
    twice. Entries that are not selected are never part of the result, whatever they hold. An
    empty selection gives zeros and lse = -inf. log_size is indexed like k. With q on CUDA, k and
    v may lie in pinned host memory: the kernel then fetches the picked rows itself.

    Raises as `attention` does, and ValueError for an index of N or more, or below -1 (on CUDA the
    head's result is NaN instead).
    """
    checks.check_query_key(q, k)
    checks.check_value(v, q, (k.shape[0], k.shape[1], k.shape[2]))
    if log_size is not None:
        checks.check_log_size(log_size, tuple(k.shape[:3]), q)
    padded = checks.check_indices(indices, (k.shape[0], k.shape[1]), k.shape[2], q)
    factor = checks.resolve_scale(scale, q.shape[3])
    if use_triton(impl, q):
        from .kernels import attention as kernel

        return kernel.attention(q, k, v, log_size, None, indices, False, factor)
    checks.check_on_device(q, k=k, v=v)
    return plain_selected.selected_attention(q, k, v, indices, log_size, factor, padded)
