"""What the launches share: block sizes, the split over keys, the workspace, tuning choices."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

INTERPRETED = knobs.runtime.interpret
MAX_SPLITS = 128
MIN_SPLIT = 64 if INTERPRETED else 512  # keys per program; small in tests so that splits happen

_workspaces: dict[tuple[torch.device, int], list[Tensor]] = {}


def tune(key: list[str]) -> Any:
    """Autotuning over a short list, once per `key`; the interpreter has nothing to time."""
    choices = [(32, 1)] if INTERPRETED else [(32, 2), (64, 2), (64, 3), (128, 2), (128, 3)]
    configs = [
        triton.Config({"BLOCK_N": size}, num_warps=warps, num_stages=stages)
        for size, stages in choices
        for warps in ((4,) if size < 128 else (4, 8))
    ]
    return triton.autotune(configs, key=key)


def power(n: int) -> int:
    """The smallest power of two that is n or more and that tl.dot takes."""
    return max(16, triton.next_power_of_2(n))


def bucket(n: int) -> int:
    """Tuning key for a count that grows by one each step: choices hold for a factor of four."""
    return (n.bit_length() + 1) // 2


def precision(dtype: torch.dtype) -> str:
    """How `online.dot` multiplies: float32 in full precision; the half types have one way only.

    The interpreter's tl.dot takes bfloat16 for the integers it stores them as: "upcast".
    """
    if dtype == torch.bfloat16 and INTERPRETED:
        return "upcast"
    return "ieee" if dtype == torch.float32 else "tf32"


def split(n: int, programs: int, device: torch.device) -> tuple[int, int]:
    """(number of splits, keys per split): about two programs per multiprocessor."""
    wanted = max(1, 2 * _processors(device) // max(1, programs))
    size = max(MIN_SPLIT, triton.cdiv(n, min(wanted, MAX_SPLITS)))
    size = triton.cdiv(size, MIN_SPLIT) * MIN_SPLIT
    return max(1, triton.cdiv(n, size)), size


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def workspace(elements: int, device: torch.device) -> Tensor:
    """float32[elements], reused by every later call on the same stream; uninitialised.

    Outgrown buffers are kept: a captured CUDA graph may still write to them. Sizes double, so
    that all of them together are at most twice the largest.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    buffers = _workspaces.setdefault((device, stream), [])
    if not buffers or buffers[-1].numel() < elements:
        grown = max(elements, 2 * buffers[-1].numel() if buffers else 0)
        buffers.append(torch.empty(grown, dtype=torch.float32, device=device))
    return buffers[-1][:elements]
