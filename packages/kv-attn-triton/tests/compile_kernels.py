"""Compiles every kernel to a GPU binary, which needs no GPU. Run by test_compile.py."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv_attn_triton.kernels import attention, cluster, columns, lowrank

POINTERS = {
    "log_size": "*fp32",
    "lengths": "*i32",
    "indices": "*i64",
    "lse": "*fp32",
    "part_lse": "*fp32",
    "part_out": "*fp32",
    "mask": "*u8",
    "offsets": "*i64",
    "seeds": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
}


def compile_for(kernel, element, capability, **constants):
    function = kernel.fn if isinstance(kernel, triton.runtime.Autotuner) else kernel
    names = function.arg_names
    types = {name: "i32" for name in names}
    types |= {name: element for name in ("q", "k", "v", "left", "right", "keys") if name in types}
    types |= {name: kind for name, kind in POINTERS.items() if name in types}
    types |= {name: "fp32" for name in ("scale", "theta") if name in types}
    if "out" in types:
        types["out"] = "*fp32"
    types |= {name: "constexpr" for name in constants}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, types, fixed)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(done.asm["cubin"]) > 0
    print(function.fn.__name__, element, capability, "ok")


def main():
    element = "*bf16"
    shape = {"D": 64, "BLOCK_D": 64, "PRECISION": "tf32", "BLOCK_N": 32}
    value = {"DV": 80, "BLOCK_DV": 128}
    rows = {"Q": 2, "R": 8, "ROWS": 16}
    seen = {"HAS_MASK": True, "CAUSAL": True}
    compile_for(
        attention._split_kernel,
        element,
        90,
        HAS_LOG_SIZE=True,
        HAS_LENGTHS=True,
        HAS_INDICES=False,
        CAUSAL=True,
        indices=None,
        **shape,
        **value,
        **rows,
    )
    compile_for(
        attention._split_kernel,
        element,
        80,
        HAS_LOG_SIZE=False,
        HAS_LENGTHS=False,
        HAS_INDICES=True,
        CAUSAL=False,
        log_size=None,
        lengths=None,
        **shape,
        **value,
        **rows,
    )
    compile_for(
        lowrank._lowrank_kernel,
        element,
        80,
        R=8,
        ROWS=16,
        D=80,
        RANK=160,
        HALF=32,
        BLOCK_HALF=32,
        BLOCK_REST=16,
        BLOCK_RANK=32,
        BLOCK_N=32,
        INTERLEAVED=False,
        GATHERED=True,
        HAS_LOG_SIZE=True,
        PRECISION="tf32",
        **value,
    )
    compile_for(columns._state_kernel, element, 80, **seen, **shape, **rows)
    compile_for(
        columns._column_kernel, element, 80, Q=32, G=4, BLOCK_Q=32, KIND="max", **seen, **shape
    )
    compile_for(cluster._cluster_kernel, element, 80, D=64, BLOCK_D=64, BLOCK=32)
    compile_for(attention._merge_kernel, element, 80, DV=80, BLOCK_DV=128, BLOCK_S=8)


if __name__ == "__main__":
    main()
