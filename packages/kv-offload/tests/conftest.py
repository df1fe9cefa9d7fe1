from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# The package as its users get it, for the tests of its own checks: with the import hook below,
# jaxtyping would refuse most wrong arguments before the package sees them.
import kv_offload as unhooked

for name in [name for name in sys.modules if name.partition(".")[0] == "kv_offload"]:
    del sys.modules[name]
install_import_hook("kv_offload", "beartype.beartype")

COMMON = {
    "deadline": None,
    "derandomize": "CI" in os.environ,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("default", max_examples=200, **COMMON)
settings.register_profile("quick", max_examples=20, **COMMON)
settings.register_profile("thorough", max_examples=5000, **COMMON)
settings.load_profile("default")


@pytest.fixture
def plain() -> ModuleType:
    """The package without run-time type checks."""
    return unhooked


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is NaN, or the largest integer: reading it unwritten cannot go unnoticed."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
