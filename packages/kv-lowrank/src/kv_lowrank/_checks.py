"""Checks of what callers pass in; each error names the argument, its value and what was wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_floating(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """`value` is a floating tensor of at least `least` (and at most `most`) dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {value.dtype}")
    if value.ndim < least or (most is not None and value.ndim > most):
        wanted = f"{least}" if most == least else f"at least {least}"
        raise ValueError(f"{name} must have {wanted} dimensions, got shape {tuple(value.shape)}")


def check_dtype(name: str, value: object, dtype: torch.dtype) -> None:
    """`value` is a tensor of `dtype`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != dtype:
        raise TypeError(f"{name} must be of dtype {dtype}, got {value.dtype}")


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """`value` lives on `device`."""
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, got {value.device}")


def check_positive(name: str, value: object) -> None:
    """`value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_threshold(value: float) -> None:
    """`threshold` is not negative and not NaN."""
    if not value >= 0:
        raise ValueError(f"threshold must not be negative, got {value}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_finite(name: str, value: Tensor) -> None:
    """`value` holds neither NaN nor infinity. Reads the values once, without a copy."""
    if value.numel() == 0:
        return
    low, high = (float(bound) for bound in value.aminmax())  # aminmax passes NaN on
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} must be finite, got values from {low} to {high}")


def check_indices(name: str, value: Tensor, count: int) -> None:
    """`value` is int64 within [-1, count). On another device than the CPU the reading kernel
    checks the range itself: looking here would wait for the device in every decoding step."""
    check_dtype(name, value, torch.int64)
    if value.device.type != "cpu" or value.numel() == 0:
        return
    low, high = (int(bound) for bound in value.aminmax())
    if low < -1 or high >= count:
        raise ValueError(f"{name} must lie within -1 (none) and {count - 1}, got {low} to {high}")


def check_offsets(name: str, value: Tensor, batch: int, tokens: int, device: torch.device) -> None:
    """`value` is int64[S+1] from 0 to T, or int64[B, S+1] inside [0, T]; never falling."""
    check_dtype(name, value, torch.int64)
    if value.ndim not in (1, 2) or value.shape[-1] < 1:
        raise ValueError(
            f"{name} must have shape [S+1] or [B, S+1], got shape {tuple(value.shape)}"
        )
    if value.ndim == 2 and value.shape[0] != batch:
        raise ValueError(f"{name} must have {batch} rows, got shape {tuple(value.shape)}")
    check_device(name, value, device)
    if value.numel() == 0:
        return
    if bool((value.diff(dim=-1) < 0).any()):
        raise ValueError(f"{name} must never fall from one entry to the next")
    low, high = (int(bound) for bound in value.aminmax())
    if low < 0 or high > tokens:
        raise ValueError(f"{name} must lie within 0 and T = {tokens}, got {low} to {high}")
    if value.ndim == 1 and (low != 0 or high != tokens):
        raise ValueError(f"{name} must begin at 0 and end at T = {tokens}, got {low} to {high}")
