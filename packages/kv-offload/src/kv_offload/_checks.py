"""Checks of arguments, each with a message that says what was found and what was wanted."""

from __future__ import annotations

from collections.abc import Sequence

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


def check_ragged(rows: object) -> None:
    """`rows` is a sequence of tensors `[H, N_b, D]`, at least one, alike in all but N_b."""
    if not isinstance(rows, Sequence):
        raise TypeError(f"rows is {rows!r}, wanted a sequence of tensors")
    if not rows:
        raise ValueError("rows is empty, wanted a tensor for each batch row")
    for b, row in enumerate(rows):
        check_storable(f"rows[{b}]", row)
        if row.ndim != 3:
            raise ValueError(f"rows[{b}] has shape {tuple(row.shape)}, wanted [H, N_b, D]")
        if row.dtype != rows[0].dtype:
            raise TypeError(f"rows[{b}] has dtype {row.dtype}, wanted {rows[0].dtype} as rows[0]")
        heads, _, width = rows[0].shape
        if (row.shape[0], row.shape[2]) != (heads, width):
            raise ValueError(
                f"rows[{b}] has shape {tuple(row.shape)}, wanted ({heads}, N_b, {width}) as rows[0]"
            )


def check_int64(name: str, indices: object) -> None:
    """`indices` is an int64 tensor."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"{name} is {indices!r}, wanted an int64 tensor")
    if indices.dtype != torch.int64:
        raise TypeError(f"{name} has dtype {indices.dtype}, wanted torch.int64")


def check_text(name: str, value: object) -> str:
    """`value` is a str; returned."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, wanted a str")
    return value


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


def check_indices(indices: Tensor, shape: torch.Size, device: torch.device) -> None:
    """`indices` is int64 `[B, H, K]` on the CPU or `device`, `shape` being `(B, H, N, D)`."""
    check_int64("indices", indices)
    batch, heads = shape[:2]
    if indices.ndim != 3 or indices.shape[:2] != (batch, heads):
        raise ValueError(f"indices has shape {tuple(indices.shape)}, wanted ({batch}, {heads}, K)")
    if indices.device.type != "cpu" and indices.device != device:
        raise ValueError(f"indices is on device {indices.device}, wanted cpu or {device}")


def check_range(indices: Tensor, lengths: Sequence[int]) -> int:
    """All `indices[b]` are in `[-1, lengths[b])`; returns the lowest. Waits for the device."""
    if not indices.numel():
        return 0
    lows, highs = torch.stack(indices.flatten(1).aminmax(dim=1)).tolist()
    for b, (low, high, length) in enumerate(zip(lows, highs, lengths, strict=True)):
        if low < -1 or high >= length:
            raise ValueError(
                f"indices holds {low if low < -1 else high}, wanted -1 (skip) or a row below "
                f"{length}, the number of rows held in batch row {b}"
            )
    return int(min(lows))


def check_lengths(name: str, lengths: Tensor, limits: Sequence[int]) -> list[int]:
    """`lengths` is int64 `[B]`, each in `[0, limits[b]]`; returned as a list."""
    check_int64(name, lengths)
    if tuple(lengths.shape) != (len(limits),):
        raise ValueError(f"{name} has shape {tuple(lengths.shape)}, wanted ({len(limits)},)")
    found: list[int] = lengths.tolist()
    for b, (length, limit) in enumerate(zip(found, limits, strict=True)):
        if not 0 <= length <= limit:
            raise ValueError(f"{name} holds {length} for batch row {b}, wanted 0 to {limit}")
    return found


def check_out(
    out: object, indices: Tensor, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """`out` can take the rows of `indices`: `[B, H, K, D]` of `dtype` on `device`."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out is {out!r}, wanted a {dtype} tensor")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, wanted {dtype}")
    wanted = (*indices.shape, width)
    if tuple(out.shape) != wanted:
        raise ValueError(f"out has shape {tuple(out.shape)}, wanted {wanted}")
    if out.device != device:
        raise ValueError(f"out is on device {out.device}, wanted {device}")


def check_device(device: object) -> torch.device:
    """`device` names a device that this torch can use; `cuda` means the current one."""
    try:
        found = torch.device(device)  # type: ignore[call-overload]
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch's ways to say it has none
        raise ValueError(f"device is {device!r}, wanted one that torch can use: {error}") from error
    return found
