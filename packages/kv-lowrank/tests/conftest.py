from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from jaxtyping import config as shape_checks
from jaxtyping import install_import_hook

common = {"deadline": None, "derandomize": bool(os.environ.get("CI"))}
settings.register_profile("default", max_examples=200, **common)
settings.register_profile("quick", max_examples=20, **common)
settings.register_profile("thorough", max_examples=5000, **common)
settings.load_profile("default")

install_import_hook("kv_lowrank", "beartype.beartype")
torch.set_num_threads(1)


@pytest.fixture
def plain() -> Iterator[None]:
    """The package as a user without shape checks meets it: its own errors, not jaxtyping's."""
    shape_checks.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        shape_checks.update("jaxtyping_disable", False)
