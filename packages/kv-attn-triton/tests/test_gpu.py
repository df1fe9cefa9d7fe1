"""The kernels on the GPU of this machine, if there is one: compiled, not interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_the_gpu():
    """In a process of its own: this one has chosen the interpreter for all of its kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("gpu_checks.py"))],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok") == (6 if torch.cuda.device_count() > 1 else 5)
