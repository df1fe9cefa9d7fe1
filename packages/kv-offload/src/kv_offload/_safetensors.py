"""The safetensors format, written and mapped here so that large tensors are streamed and shared."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes

Entry = tuple[str, torch.dtype, tuple[int, ...]]


def check_storable(name: str, tensor: object) -> None:
    """`tensor` is a dense tensor of a dtype with a name; `name` is the argument's."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {tensor!r}, wanted a tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}, wanted torch.strided")
    if tensor.dtype not in DTYPE_NAMES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPE_NAMES)
        raise TypeError(f"{name} has dtype {tensor.dtype}, wanted one of {known}")


def header_bytes(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON header for tensors that follow in the order of `entries`.

    The header is padded with spaces to a multiple of 8 bytes: with wide dtypes first, every
    tensor then starts at a multiple of its element size.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise ValueError(f"the header has {len(text)} bytes, wanted at most {LONGEST_HEADER}")
    return len(text).to_bytes(8, "little") + text


def mapped_tensor(
    mapping: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor over the bytes of `mapping` from `offset` on; it keeps the mapping alive."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=offset)
    return flat.view(dtype).view(shape)
