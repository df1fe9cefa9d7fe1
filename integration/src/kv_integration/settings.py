"""What a method was made with, as text that is equal where the settings are."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kv_integration.method import Method


def settings(method: Method) -> dict[str, Any]:
    """A method's arguments by name; all attributes of one that is no dataclass."""
    if dataclasses.is_dataclass(method):
        return {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return dict(vars(method))


def describe(method: Method) -> str:
    """A method and its settings as `repr` gives them, but tensors and modules by their numbers.

    The `repr` of a module, such as SeKV's router, and of large tensors leaves numbers out.
    """
    given = ", ".join(f"{name}={_text(value)}" for name, value in settings(method).items())
    return f"{type(method).__qualname__}({given})"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor({list(value.shape)}, {_digest([value])})"
    if isinstance(value, nn.Module):
        state = sorted(value.state_dict().items())
        return f"{type(value).__qualname__}({_digest(tensor for _, tensor in state)})"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    return repr(value)


def _digest(tensors: Iterable[Tensor]) -> str:
    """Of shapes, dtypes and bytes, wherever they lie."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()[:32]}"
