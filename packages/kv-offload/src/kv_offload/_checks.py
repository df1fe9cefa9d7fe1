"""Checks of arguments, each with a message that says what was found and what was wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_offload._safetensors import check_storable

TIERS = ("device", "host", "disk")


def check_tier(tier: object) -> None:
    """`tier` is one of the three."""
    if tier not in TIERS:
        raise ValueError(f"tier is {tier!r}, wanted one of {', '.join(map(repr, TIERS))}")


def check_rows(name: str, rows: Tensor) -> None:
    """`rows` is a tensor `[B, H, N, D]` that can be stored."""
    check_storable(name, rows)
    if rows.ndim != 4:
        raise ValueError(f"{name} has shape {tuple(rows.shape)}, wanted [B, H, N, D]")


def check_int64(name: str, indices: object) -> None:
    """`indices` is an int64 tensor."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"{name} is {indices!r}, wanted an int64 tensor")
    if indices.dtype != torch.int64:
        raise TypeError(f"{name} has dtype {indices.dtype}, wanted torch.int64")


def check_count(name: str, count: object) -> None:
    """`count` is an int, and True is none."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{name} is {count!r}, wanted an int")


def check_batch_indices(batch_indices: Tensor, batch: int) -> list[int]:
    """`batch_indices` is int64 `[B2]` in `[0, batch)`; returned as a list."""
    check_int64("batch_indices", batch_indices)
    if batch_indices.ndim != 1:
        raise ValueError(
            f"batch_indices has shape {tuple(batch_indices.shape)}, wanted one dimension"
        )
    order: list[int] = batch_indices.tolist()
    for index in order:
        if not 0 <= index < batch:
            raise ValueError(f"batch_indices holds {index}, wanted 0 to {batch - 1}")
    return order


def check_indices(indices: Tensor, rows: Tensor, device: torch.device) -> None:
    """`indices` is int64 `[B, H, K]` on the CPU or `device`, B and H those of `rows`."""
    check_int64("indices", indices)
    batch, heads = rows.shape[:2]
    if indices.ndim != 3 or indices.shape[:2] != (batch, heads):
        raise ValueError(f"indices has shape {tuple(indices.shape)}, wanted ({batch}, {heads}, K)")
    if indices.device.type != "cpu" and indices.device != device:
        raise ValueError(f"indices is on device {indices.device}, wanted cpu or {device}")


def check_range(indices: Tensor, length: int) -> int:
    """All `indices` are in `[-1, length)`; returns the lowest. Waits for the device."""
    if not indices.numel():
        return 0
    low, high = torch.stack(indices.aminmax()).tolist()
    if low < -1 or high >= length:
        raise ValueError(
            f"indices holds {low if low < -1 else high}, wanted -1 (skip) or a row below {length}, "
            "the number of rows held"
        )
    return int(low)


def check_out(out: object, indices: Tensor, rows: Tensor, device: torch.device) -> None:
    """`out` can take the rows of `indices`: `[B, H, K, D]` on `device`, of the dtype of `rows`."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out is {out!r}, wanted a {rows.dtype} tensor")
    if out.dtype != rows.dtype:
        raise TypeError(f"out has dtype {out.dtype}, wanted {rows.dtype}")
    wanted = (*indices.shape, rows.shape[3])
    if tuple(out.shape) != wanted:
        raise ValueError(f"out has shape {tuple(out.shape)}, wanted {wanted}")
    if out.device != device:
        raise ValueError(f"out is on device {out.device}, wanted {device}")
