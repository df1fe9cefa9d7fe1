"""Compiles every kernel to a GPU binary, which needs no GPU. Run by test_compile.py.

`--all` takes every head size, dtype and tile instead of one of each, and prints for each binary
the registers that spill and the shared memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv_attn_triton.kernels import attention, cluster, columns, landmarks, lowrank, merge, spans

POINTERS = {
    "log_size": "*fp32",
    "lengths": "*i32",
    "starts": "*i64",
    "indices": "*i64",
    "lse": "*fp32",
    "logits": "*fp32",
    "states": "*fp32",
    "part_lse": "*fp32",
    "part_out": "*fp32",
    "mask": "*u8",
    "offsets": "*i64",
    "spans": "*i64",
    "seeds": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
}
ELEMENTS = ("q", "k", "v", "left", "right", "keys", "out")
ELEMENTS += ("k_left", "k_right", "v_left", "v_right")
# strides that are multiples of 16 in a real launch, and pointers that torch aligned
ALIGNED = {
    "k_b",
    "k_h",
    "k_n",
    "v_b",
    "v_h",
    "v_n",
    "l_b",
    "l_n",
    "r_b",
    "r_h",
    "r_r",
    "q_b",
    "q_h",
    *(f"{factor}_{stride}" for factor in ("kl", "vl") for stride in "bhn"),
    *(f"{factor}_{stride}" for factor in ("kr", "vr") for stride in "bhs"),
}


def power(n):
    return max(16, triton.next_power_of_2(n))


def compile_for(kernel, capability, element="bf16", stages=3, warps=4, types=(), **constants):
    function = kernel.fn if isinstance(kernel, triton.runtime.Autotuner) else kernel
    names = function.arg_names
    kinds = {name: "i32" for name in names}
    kinds |= {name: f"*{element}" for name in ELEMENTS}
    kinds |= {"scale": "fp32", "theta": "fp32", **POINTERS, **dict(types)}
    kinds = {name: "constexpr" if name in constants else kinds[name] for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    even = [["tt.divisibility", 16]]
    aligned = {
        (i,): even
        for i, name in enumerate(names)
        if name in ALIGNED or str(kinds[name]).startswith("*")
    }
    source = ASTSource(function, kinds, fixed, aligned)
    target = GPUTarget("cuda", capability, 32)
    done = triton.compile(source, target, {"num_stages": stages, "num_warps": warps})
    assert len(done.asm["cubin"]) > 0
    shared = done.metadata.shared
    print(function.fn.__name__, element, f"sm_{capability}", "ok", flush=True)
    return done, shared


def split_kernel(capability, element, size, block, stages, warps, rows=16, **flags):
    given = {"HAS_LOG_SIZE": True, "HAS_LENGTHS": True, "HAS_STARTS": False}
    given |= {"HAS_INDICES": False, "CAUSAL": False, **flags}
    absent = {"HAS_LOG_SIZE": "log_size", "HAS_LENGTHS": "lengths", "HAS_STARTS": "starts"}
    absent |= {"HAS_INDICES": "indices"}
    absent = {name: None for flag, name in absent.items() if not given[flag]}
    return compile_for(
        attention._split_kernel,
        capability,
        element,
        stages,
        warps,
        [("out", "*fp32")],
        Q=2,
        R=rows // 2,
        D=size,
        DV=size,
        ROWS=rows,
        BLOCK_D=power(size),
        BLOCK_DV=power(size),
        PRECISION="tf32x3" if element == "fp32" else "tf32",
        BLOCK_N=block,
        **absent,
        **given,
    )


def lowrank_kernel(capability, element, size, block, stages, warps, turned=None, rank=160):
    half = (size if turned is None else turned) // 2
    return compile_for(
        lowrank._lowrank_kernel,
        capability,
        element,
        stages,
        warps,
        [("out", "*fp32")],
        Q=1,
        R=4,
        ROWS=16,
        D=size,
        DV=size,
        RANK=rank,
        HALF=half,
        BLOCK_HALF=power(half),
        BLOCK_REST=power(size - 2 * half),
        BLOCK_DV=power(size),
        BLOCK_RANK=32,
        BLOCK_N=block,
        INTERLEAVED=False,
        GATHERED=True,
        HAS_LOG_SIZE=True,
        PRECISION="tf32x3" if element == "fp32" else "tf32",
    )


def span_kernel(capability, element, size, block, stages, warps, rank=32):
    return compile_for(
        spans._span_kernel,
        capability,
        element,
        stages,
        warps,
        [("out", "*fp32")],
        Q=1,
        R=4,
        ROWS=16,
        D=size,
        DV=size,
        RANK=rank,
        VALUE_RANK=rank,
        BLOCK_D=power(size),
        BLOCK_DV=power(size),
        BLOCK_RANK=power(rank),
        BLOCK_VALUE_RANK=power(rank),
        PRECISION="tf32x3" if element == "fp32" else "tf32",
        BLOCK_N=block,
    )


def state_kernel(capability, element, size, block, stages, warps, keep=False, causal=True):
    return compile_for(
        columns._state_kernel,
        capability,
        element,
        stages,
        warps,
        Q=1 if keep else 32,
        R=4 if keep else 128,
        ROWS=16 if keep else 64,
        D=size,
        BLOCK_D=power(size),
        HAS_MASK=True,
        CAUSAL=causal,
        KEEP=keep,
        PRECISION="tf32x3" if element == "fp32" else "tf32",
        BLOCK_N=block,
        **({} if keep else {"logits": None}),
    )


def column_kernel(capability, element, size, block, stages, warps):
    return compile_for(
        columns._column_kernel,
        capability,
        element,
        stages,
        warps,
        [("out", "*fp32")],
        Q=32,
        G=4,
        D=size,
        BLOCK_D=power(size),
        BLOCK_Q=32,
        HAS_MASK=True,
        CAUSAL=True,
        KIND="sum",
        PRECISION="tf32x3" if element == "fp32" else "tf32",
        BLOCK_N=block,
    )


def cluster_kernel(capability, element, size):
    return compile_for(
        cluster._cluster_kernel,
        capability,
        element,
        D=size,
        BLOCK_D=power(size),
        BLOCK=16 if element == "fp32" else 32,
        PRECISION="tf32x3" if element == "fp32" else "tf32",
    )


def select_kernel(capability, block, queries=1):
    return compile_for(
        landmarks._select_kernel,
        capability,
        types=[("out", "*i64")],
        warps=landmarks.warps(block),
        G=4,
        Q=queries,
        HAS_MASK=True,
        BLOCK=block,
        BLOCK_S=32,
        BLOCK_OUT=256,
    )


def merge_kernels(capability, element):
    compile_for(
        attention._merge_kernel, capability, element, DV=80, BLOCK_DV=128, BLOCK_S=32, TILE=16
    )
    return compile_for(
        merge._parts_kernel,
        capability,
        types=[("outs", (f"*{element}",) * 3), ("states", ("*fp32",) * 3)],
        DV=80,
        BLOCK_DV=128,
        BLOCK=4,
    )


def one_of_each():
    split_kernel(90, "bf16", 128, 64, 2, 4, CAUSAL=True, HAS_STARTS=True)
    split_kernel(80, "fp16", 80, 32, 2, 4, HAS_LENGTHS=False, HAS_INDICES=True)
    lowrank_kernel(80, "bf16", 80, 32, 2, 4, turned=64)
    span_kernel(80, "bf16", 80, 32, 2, 4)
    state_kernel(80, "bf16", 64, 64, 2, 4)
    column_kernel(80, "bf16", 64, 64, 2, 4)
    select_kernel(90, 1024)
    cluster_kernel(80, "bf16", 64)
    merge_kernels(80, "bf16")


def spills(cubin):
    """Bytes of registers a thread keeps in local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
    return re.search(r"REG:(\d+) STACK:(\d+)", text).groups()


def everything():
    tiles = [(32, 2, 4), (64, 3, 4), (128, 3, 8)]

    def show(made, *what):
        done, shared = made
        registers, stack = spills(done.asm["cubin"])
        print("   ", *what, "registers", registers, "stack", stack, "shared", shared, flush=True)

    for capability in (80, 90):
        for block in (128, 1024, 4096, 16384, 32768):
            show(select_kernel(capability, block), "select", block)
        for element in ("bf16", "fp16", "fp32"):
            merge_kernels(capability, element)
            for size in (32, 64, 80, 96, 128, 256):
                show(cluster_kernel(capability, element, size), "cluster", size)
                for tile in tiles:
                    case = (capability, element, size, *tile)
                    show(split_kernel(*case), *case)
                    show(split_kernel(*case, HAS_LENGTHS=False, HAS_INDICES=True), *case)
                    show(split_kernel(*case, rows=64, CAUSAL=True), *case)
                    show(lowrank_kernel(*case), *case)
                    show(span_kernel(*case), *case)
                    show(span_kernel(*case, rank=min(size, 128)), *case)
                    show(state_kernel(*case), *case)
                    show(state_kernel(*case, keep=True, causal=False), *case)
                    show(column_kernel(*case), *case)


if __name__ == "__main__":
    everything() if "--all" in sys.argv else one_of_each()
