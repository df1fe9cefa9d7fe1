"""Hypothesis profiles, shape checks on every call, Triton's interpreter, poisoned buffers."""

from __future__ import annotations

import os

# before anything imports triton: the kernels then run on CPU tensors
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

settings.register_profile(
    "default", max_examples=200, deadline=None, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile("default")

with install_import_hook("kv_attn_triton", "beartype.beartype"):
    import kv_attn_triton  # noqa: F401


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty and new_empty hand out NaN, so that a cell never written shows."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poison(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **kw: poison(empty(*a, **kw)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **kw: poison(new_empty(*a, **kw)))
    from kv_attn_triton.kernels import launch

    for buffer in launch._workspaces.values():
        buffer.fill_(torch.nan)
