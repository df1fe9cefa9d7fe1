"""Checks of what callers pass in; each error names the argument, its value and what was wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensor(name: str, value: object, *, ndim: int, floating: bool = True) -> None:
    """`value` is a tensor of `ndim` dimensions, of floating dtype where `floating`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(value.shape)}")
    if floating and not value.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {value.dtype}")


def check_shape(name: str, value: Tensor, wanted: Sequence[int], *, broadcast: int = -1) -> None:
    """`value` has the shape `wanted`; the dimension `broadcast` may also be 1."""
    for axis, (got, want) in enumerate(zip(value.shape, wanted, strict=True)):
        if got != want and not (axis == broadcast and got == 1):
            raise ValueError(f"{name} must have shape {tuple(wanted)}, got {tuple(value.shape)}")


def check_mask(name: str, value: object, wanted: Sequence[int], device: torch.device) -> None:
    """`value` is a bool tensor of the shape `wanted` on `device`."""
    check_tensor(name, value, ndim=len(wanted), floating=False)
    mask: Tensor = value  # type: ignore[assignment]
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must be of dtype torch.bool, got {mask.dtype}")
    check_shape(name, mask, wanted)
    check_device(name, mask, device)


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """`value` lives on `device`."""
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, got {value.device}")


def check_readable(name: str, value: Tensor) -> None:
    """`value` has values that can be looked at."""
    if value.is_meta:
        raise ValueError(f"{name} must hold values, got a tensor on {value.device}")


def check_positive(name: str, value: object) -> None:
    """`value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_number(name: str, value: float, *, low: float = -math.inf) -> None:
    """`value` is a finite number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < low:
        wanted = "finite" if low == -math.inf else f"finite and at least {low:g}"
        raise ValueError(f"{name} must be {wanted}, got {value}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_queries_and_keys(
    query_name: str, queries: Tensor, key_name: str, keys: Tensor, *, query_ndim: int = 4
) -> int:
    """Both belong together as [B, H_q, ..., D] and [B, H_kv, N, D]; returns H_q // H_kv."""
    check_tensor(query_name, queries, ndim=query_ndim)
    check_tensor(key_name, keys, ndim=4)
    check_device(key_name, keys, queries.device)
    if queries.shape[0] != keys.shape[0] or queries.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"{query_name} and {key_name} must agree in batch and head size, "
            f"got {tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    heads, kv_heads = queries.shape[1], keys.shape[1]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"the heads of {query_name} must be a multiple of the heads of {key_name}, "
            f"got {heads} and {kv_heads}"
        )
    return heads // kv_heads


def check_scores(name: str, value: object) -> None:
    """`value` is float32[B, H, T]: finite, or -inf where forbidden. Reads the values once."""
    check_tensor(name, value, ndim=3)
    scores: Tensor = value  # type: ignore[assignment]
    if scores.dtype != torch.float32:
        raise TypeError(f"{name} must be of dtype torch.float32, got {scores.dtype}")
    check_readable(name, scores)
    if scores.numel() == 0:
        return
    top = scores.amax().item()  # amax passes NaN on
    if math.isnan(top):
        raise ValueError(f"{name} must not hold NaN, got {int(scores.isnan().sum())} of them")
    if top == math.inf:
        raise ValueError(f"{name} must be finite or -inf (forbidden), got +inf")


def check_offsets(name: str, value: object, batch: int, tokens: int, device: torch.device) -> None:
    """`value` is int64[S+1] from 0 to T, or int64[B, S+1] inside [0, T]; never falling."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != torch.int64:
        raise TypeError(f"{name} must be of dtype torch.int64, got {value.dtype}")
    if value.ndim not in (1, 2) or value.shape[-1] < 1:
        raise ValueError(
            f"{name} must have shape [S+1] or [B, S+1], got shape {tuple(value.shape)}"
        )
    if value.ndim == 2 and value.shape[0] != batch:
        raise ValueError(f"{name} must have {batch} rows, got shape {tuple(value.shape)}")
    check_device(name, value, device)
    check_readable(name, value)
    if value.numel() == 0:
        return
    if bool((value.diff(dim=-1) < 0).any()):
        raise ValueError(f"{name} must never fall from one entry to the next, got {_short(value)}")
    low, high = (int(bound) for bound in value.aminmax())
    if low < 0 or high > tokens:
        raise ValueError(f"{name} must lie within 0 and T = {tokens}, got {low} to {high}")
    if value.ndim == 1 and (low != 0 or high != tokens):
        raise ValueError(f"{name} must begin at 0 and end at T = {tokens}, got {low} to {high}")


def _short(value: Tensor) -> str:
    """The first entries of `value`, for an error's text."""
    flat = value.flatten().tolist()
    return str(flat) if len(flat) <= 16 else f"[{', '.join(map(str, flat[:16]))}, ...]"
