from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from small_model import make_folder

common = {"deadline": None, "derandomize": bool(os.environ.get("CI"))}
settings.register_profile("default", max_examples=200, **common)
settings.register_profile("quick", max_examples=20, **common)
settings.register_profile("thorough", max_examples=5000, **common)
settings.load_profile("default")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))
