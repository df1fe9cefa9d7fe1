"""What every public function asks of its arguments, checked before any work.

Shapes, dtypes and devices are always checked. Values (lengths, indices) are checked where that
costs no device synchronisation, that is for CPU tensors; on CUDA the kernels never read outside
the tensors and answer a value out of range with NaN in the rows it touches.
"""

from __future__ import annotations

import math

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_query_key(q: torch.Tensor, k: torch.Tensor, *, name: str = "k") -> None:
    """q [B, H_q, Q, D] against k [B, H_kv, N, D]: rank, dtype, device, sizes, head grouping."""
    check_rank("q", q, 4)
    check_rank(name, k, 4)
    check_float(q)
    check_like(name, k, q)
    batch, query_heads, _, size = q.shape
    rows, key_heads, _, key_size = k.shape
    if rows != batch:
        raise ValueError(f"{name} must have q's batch size {batch}, got {rows}")
    if key_size != size or size == 0:
        raise ValueError(
            f"{name} must have q's head size, at least 1; got {key_size} for q's {size}"
        )
    check_groups(query_heads, key_heads)


def check_entries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q against k and v [B, H_kv, N, Dv]: a decoding step asks once per layer, so what is right is
    told in one look; the checks one by one say what is wrong."""
    if (
        q.dim() == k.dim() == v.dim() == 4
        and q.dtype in FLOATS
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and k.stride(3) == v.stride(3) == 1
    ):
        batch, query_heads, _, size = q.shape
        rows, heads, entries, key_size = k.shape
        *beside, value_size = v.shape
        if (
            batch == rows
            and size == key_size
            and beside == [rows, heads, entries]
            and heads
            and query_heads % heads == 0
            and size
            and value_size
        ):
            return
    check_query_key(q, k)
    check_value(v, q, (k.shape[0], k.shape[1], k.shape[2]))


def check_rank(name: str, x: torch.Tensor, rank: int) -> None:
    if x.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got shape {tuple(x.shape)}")


def check_float(q: torch.Tensor) -> None:
    if q.dtype not in FLOATS:
        raise TypeError(f"q must be float32, bfloat16 or float16, got {q.dtype}")


def check_value(v: torch.Tensor, q: torch.Tensor, rows: tuple[int, int, int]) -> None:
    """v [B, H_kv, N, Dv] with `rows` = (B, H_kv, N), of q's dtype and device."""
    if v.dim() != 4 or v.shape[3] == 0 or tuple(v.shape[:3]) != rows:
        wanted = ", ".join(map(str, rows))
        raise ValueError(f"v must have shape [{wanted}, Dv >= 1], got {tuple(v.shape)}")
    check_like("v", v, q)


def check_like(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    """One dtype and one device, and a last dimension that is contiguous in memory."""
    if x.dtype != q.dtype:
        raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    if x.device != q.device and not (q.is_cuda and x.device.type == "cpu" and x.is_pinned()):
        raise ValueError(
            f"{name} must be on q's device {q.device} (or in pinned host memory when that is "
            f"CUDA), got {x.device}"
        )
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension, got strides {tuple(x.stride())}"
        )


def check_on_device(q: torch.Tensor, **tensors: torch.Tensor) -> None:
    """The plain-torch path reads no host memory for queries on a device."""
    for name, x in tensors.items():
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def check_groups(query_heads: int, key_heads: int) -> None:
    if key_heads == 0 or query_heads % key_heads:
        raise ValueError(
            f"q must have a multiple of the {key_heads} KV heads, got {query_heads} query heads"
        )


def check_log_size(log_size: torch.Tensor, rows: tuple[int, ...], q: torch.Tensor) -> None:
    """float32[B, H_kv, N] with `rows` = (B, H_kv, N)."""
    if log_size.dtype != torch.float32:
        raise TypeError(f"log_size must be float32, got {log_size.dtype}")
    _check_beside("log_size", log_size, rows, q)


def check_lengths(lengths: torch.Tensor, k: torch.Tensor, q: torch.Tensor) -> None:
    """int32[B, H_kv] beside k, each between 0 and N."""
    if lengths.dtype != torch.int32:
        raise TypeError(f"lengths must be int32, got {lengths.dtype}")
    _check_beside("lengths", lengths, tuple(k.shape[:2]), q)
    if lengths.device.type == "cpu" and lengths.numel():
        low, high = (int(x) for x in lengths.aminmax())
        if low < 0 or high > k.shape[2]:
            raise ValueError(
                f"lengths must be between 0 and {k.shape[2]}, got {low if low < 0 else high}"
            )


def check_lists(starts: torch.Tensor, lengths: torch.Tensor, n: int, q: torch.Tensor) -> None:
    """int64 starts and int32 lengths [B, H_kv] of lists inside n entries; H_kv divides H_q."""
    for name, x, dtype in (("starts", starts, torch.int64), ("lengths", lengths, torch.int32)):
        if x.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
        check_rank(name, x, 2)
        _check_beside(name, x, (q.shape[0], starts.shape[1]), q)
    check_groups(q.shape[1], starts.shape[1])
    if starts.device.type != "cpu" or not starts.numel():
        return
    for name, x in (("starts", starts), ("lengths", lengths)):
        if int(x.min()) < 0:
            raise ValueError(f"{name} must be at least 0, got {int(x.min())}")
    last = int((starts + lengths).max())
    if last > n:
        raise ValueError(f"starts + lengths must be at most the {n} entries of k, got {last}")


def check_indices(
    indices: torch.Tensor,
    heads: tuple[int, int],
    n: int,
    q: torch.Tensor,
    *,
    name: str = "indices",
) -> bool:
    """int64[B, H_kv, K] in -1 .. n-1. True when some entry may be -1 (always so on CUDA)."""
    if indices.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {indices.dtype}")
    if indices.dim() != 3 or tuple(indices.shape[:2]) != heads:
        raise ValueError(
            f"{name} must have shape [{heads[0]}, {heads[1]}, K], got {tuple(indices.shape)}"
        )
    if indices.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {indices.device}")
    if indices.device.type != "cpu":
        return True
    if not indices.numel():
        return False
    low, high = (int(x) for x in indices.aminmax())
    if low < -1 or high >= n:
        raise ValueError(
            f"{name} must be -1 (skipped) or between 0 and {n - 1}, got {low if low < -1 else high}"
        )
    return low < 0


def check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")


def resolve_scale(scale: float | None, head_size: int) -> float:
    """The factor on q.k, 1/sqrt(D) unless told."""
    if scale is None:
        return head_size**-0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _check_beside(name: str, x: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def check_mask(mask: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    """bool of `shape`, on q's device."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}")
    _check_beside("mask", mask, shape, q)
