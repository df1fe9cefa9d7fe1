"""Checks that several modules share. Every error names the argument and its value.

Checks of shapes, dtypes and devices always run. Checks that read values of a tensor make the host
wait for a GPU, so callers run them only with `check=True`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def integer(name: str, value: int, *, least: int) -> int:
    """`value` as an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def budgets(budget: int | Sequence[int], rows: int) -> list[int]:
    """`budget` as one int of at least 0 for each of `rows` rows."""
    if not isinstance(budget, Sequence):
        return [integer("budget", budget, least=0)] * rows
    each = [integer("budget", one, least=0) for one in budget]
    if len(each) != rows:
        raise ValueError(f"budget must have one entry for each of the {rows} rows, got {each}")
    return each


def real(name: str, value: float, low: float, high: float) -> float:
    """`value` as a float in `[low, high]`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number in [{low:g}, {high:g}], got {value}")
    return float(value)


def shape(name: str, tensor: Tensor, wanted: tuple[int | None, ...], letters: str) -> None:
    """`tensor.shape` equals `wanted`, where None stands for any size."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    fits = tensor.ndim == len(wanted) and all(
        w is None or s == w for s, w in zip(tensor.shape, wanted, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if w is None else str(w) for w in wanted)
        raise ValueError(f"{name} must have shape {letters} = [{sizes}], got {list(tensor.shape)}")


def floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def dtype(name: str, tensor: Tensor, wanted: torch.dtype) -> None:
    if tensor.dtype != wanted:
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}")


def same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name}, {other.device}, got {tensor.device}"
        )


def scores(name: str, tensor: Tensor, *, check: bool) -> Tensor:
    """Scores [B, H, N], at least float32; with `check`, each finite or -inf."""
    shape(name, tensor, (None, None, None), "[B, H, N]")
    floating(name, tensor)
    if check:
        refuse(name, tensor, ~(tensor < math.inf), "finite or -inf")
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def refuse(name: str, tensor: Tensor, wrong: Tensor, wanted: str) -> None:
    """Raise for the first entry of `tensor` where `wrong` is set."""
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"{name} must be {wanted}, got {tensor[where].item()} at {where}")
