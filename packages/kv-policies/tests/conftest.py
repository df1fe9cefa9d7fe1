from __future__ import annotations

import os
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from hypothesis import settings

jaxtyping.install_import_hook("kv_policies", "beartype.beartype")
torch.set_num_threads(1)

settings.register_profile(
    "default", max_examples=200, deadline=None, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile("default")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the shape checks of the test suite, so that the package's own errors show."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
