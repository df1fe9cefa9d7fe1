"""Checks that several modules share. Every error names the argument and its value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def integer(name: str, value: int, *, least: int) -> int:
    """`value` as an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def number(name: str, value: float) -> float:
    """`value` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def as_array(name: str, value: ArrayLike) -> NDArray[Any]:
    """`value` as an array; rows of unequal length are none."""
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be an array, got {value!r}") from error


def integers(name: str, value: ArrayLike) -> NDArray[np.integer[Any]]:
    """`value` as a one-dimensional integer array, without a copy where it is one."""
    array = as_array(name, value)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.size == 0 and array.dtype.kind == "f":  # np.asarray([]) is a float array
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    return array


def delimiter_mask(name: str, value: ArrayLike) -> NDArray[np.bool_]:
    """`value` as a one-dimensional bool array: one entry per vocabulary id."""
    table = as_array(name, value)
    if table.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {table.shape}")
    if table.dtype != np.bool_:
        raise TypeError(f"{name} must be a bool array, got dtype {table.dtype}")
    return table
