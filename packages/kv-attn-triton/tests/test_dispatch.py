"""Which implementation runs, and that the package imports alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from laws import plain

from kv_attn_triton import attention, dispatch

Q, K = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 3, 8)


def run(code: str, **env: str) -> str:
    """Output of a fresh interpreter, without TRITON_INTERPRET unless given."""
    import os

    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_auto_is_torch_on_the_cpu(monkeypatch):
    from kv_attn_triton.kernels import attention as kernel

    def never(*args):
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(kernel, "attention", never)
    assert attention(Q, K, K)[0].shape == (1, 2, 1, 8)
    with pytest.raises(AssertionError, match="the kernel ran"):
        attention(Q, K, K, impl="triton")


def test_triton_is_refused_when_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_installed", lambda: False)
    with pytest.raises(ValueError, match="cannot be met: triton is not installed"):
        attention(Q, K, K, impl="triton")


def test_old_gpus_take_torch_and_refuse_triton(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    dispatch.too_old.cache_clear()
    use_triton = plain(dispatch.use_triton)
    assert not use_triton("auto", on_gpu)
    with pytest.raises(ValueError, match="cannot be met: cuda:3 has a compute capability below"):
        use_triton("triton", on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    dispatch.too_old.cache_clear()
    assert use_triton("auto", on_gpu) and use_triton("triton", on_gpu)
    dispatch.too_old.cache_clear()


def test_import_needs_neither_triton_nor_a_gpu():
    """With triton unimportable, importing and the torch path work, and the kernels say why not."""
    out = run(
        """
        import sys, importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "triton" else find(name, *a)
        sys.modules["triton"] = None
        import torch, kv_attn_triton as kv
        q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 3, 8)
        print(kv.attention(q, k, k)[0].sum().item())
        try:
            kv.attention(q, k, k, impl="triton")
        except ValueError as error:
            print(error)
        """
    )
    assert out.splitlines() == ["16.0", "impl='triton' cannot be met: triton is not installed"]


def test_import_and_torch_path_leave_triton_alone():
    out = run(
        """
        import sys, torch, kv_attn_triton as kv
        before = "triton" in sys.modules
        q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 3, 8)
        kv.attention(q, k, k)
        print(before, "kv_attn_triton.kernels" in sys.modules)
        """
    )
    assert out == "False False"


def test_triton_on_cpu_tensors_without_the_interpreter_says_why():
    out = run(
        """
        import torch, kv_attn_triton as kv
        q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 3, 8)
        try:
            kv.attention(q, k, k, impl="triton")
        except ValueError as error:
            print(error)
        """
    )
    assert out.startswith("impl='triton' cannot be met: tensors are on cpu, the kernels need CUDA")
