"""What the launches share: block sizes, the split over keys, the workspace, tuning choices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton import knobs

INTERPRETED = knobs.runtime.interpret
MIN_SPLIT = 64  # keys a program takes at least: one tile
LONG_SPLIT = 512  # keys past which a second pair of programs per multiprocessor is worth merging
MAX_ROWS = 64  # query rows of a program: eight queries of a group of eight

_workspaces: dict[tuple[torch.device, int], Tensor] = {}
Launcher = TypeVar("Launcher", bound=Callable[..., Any])


# (keys of a tile, stages of the pipeline that loads them, warps)
STREAMING = ((32, 2, 4), (64, 2, 4), (64, 3, 4), (128, 2, 4), (128, 2, 8), (128, 3, 4), (128, 3, 8))
REBUILDING = ((32, 2, 4), (32, 2, 8), (32, 3, 4), (64, 2, 4), (64, 2, 8), (128, 2, 8))


def tune(key: list[str], choices: tuple[tuple[int, int, int], ...] = STREAMING) -> Any:
    """Autotuning over a short list, once per `key` and dtype; the choice is kept on disk too.

    The interpreter has nothing to time.
    """
    configs = [
        triton.Config({"BLOCK_N": size}, num_warps=warps, num_stages=stages)
        for size, stages, warps in (choices[:1] if INTERPRETED else choices)
    ]
    return triton.autotune(
        configs,
        key=key,
        prune_configs_by={"early_config_prune": _outside_capture},
        cache_results=True,
    )


def _outside_capture(configs: list[Any], arguments: dict[str, Any], **_: Any) -> list[Any]:
    """All configs; called when shapes are new, which a CUDA graph must not be the first to meet."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "kernels are tuned by timing when shapes are first seen, which a CUDA graph cannot "
            "capture: call once with the same shapes before capturing"
        )
    return configs


def on_device(launcher: Launcher) -> Launcher:
    """Triton launches on the current device: make that the first argument's for the call."""

    @functools.wraps(launcher)
    def launch(first: Any, *rest: Any) -> Any:
        tensor = first if isinstance(first, Tensor) else first[0][0]
        if not tensor.is_cuda:
            return launcher(first, *rest)
        with torch.cuda.device(tensor.device):
            return launcher(first, *rest)

    return launch  # type: ignore[return-value]


def power(n: int) -> int:
    """The smallest power of two that is n or more and that tl.dot takes."""
    return max(16, triton.next_power_of_2(n))


def bucket(n: int) -> int:
    """Tuning key for a count that grows by one each step: choices hold for a factor of four."""
    return (n.bit_length() + 1) // 2


def precision(dtype: torch.dtype) -> str:
    """How `online.dot` multiplies: float32 as three TF32 products, an error of 2**-22 per product.

    Plain float32 products run outside the tensor cores and need more registers than there are. The
    half types have one way only; the interpreter's tl.dot takes bfloat16 for the integers it
    stores them as: "upcast".
    """
    if dtype == torch.bfloat16 and INTERPRETED:
        return "upcast"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def rows_last(x: Tensor) -> Tensor:
    """x itself when its last dimension is contiguous, as is usual; other strides are passed on."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def split(n: int, programs: int, device: torch.device) -> tuple[int, int]:
    """(number of splits, keys per split) for a list of n keys that `programs` programs share.

    At least two programs per multiprocessor, unless a program would get less than a tile of keys;
    up to four while each still has LONG_SPLIT keys, so that an uneven last wave or a short head
    costs little. The bytes of partial results stay below 3% of those of keys and values.
    """
    slots = _processors(device)
    two, four = (triton.cdiv(n * programs, each * slots) for each in (2, 4))
    size = max(MIN_SPLIT, min(two, max(four, LONG_SPLIT)))
    size = triton.cdiv(size, MIN_SPLIT) * MIN_SPLIT
    return max(1, triton.cdiv(n, size)), size


def share(n: int, programs: int, device: torch.device) -> tuple[int, int]:
    """(number of splits, items per split) for n items of a KB or more, four programs per slot."""
    size = max(1, triton.cdiv(n * programs, 4 * _processors(device)))
    return max(1, triton.cdiv(n, size)), size


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def workspace(elements: int, device: torch.device) -> Tensor:
    """float32[elements], uninitialised, that later calls on the same stream use again.

    While a CUDA graph is captured it comes from the graph's own memory, so that no graph writes to
    what another one, or a later call, uses at the same time.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(elements, dtype=torch.float32, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
    buffer = _workspaces.get((device, stream))
    if buffer is None or buffer.numel() < elements:
        size = triton.next_power_of_2(elements)
        buffer = torch.empty(size, dtype=torch.float32, device=device)
        _workspaces[device, stream] = buffer
    return buffer[:elements]
