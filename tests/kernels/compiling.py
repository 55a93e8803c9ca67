"""Compile weir's Triton kernels for NVIDIA GPUs, without a GPU: `compiling.py 90` for sm_90.

This is a separate program, because Triton decides on import whether it interprets or compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weir.kernels.gpu import decode as decode_kernel
from weir.kernels.gpu import decode_quantized as quantized_kernel
from weir.kernels.gpu import walk as walk_kernel


def size(
    kernel: Any, kind: Callable[[str], str], constants: dict[str, Any], target: GPUTarget
) -> int:
    """Bytes of a kernel's machine code. `kind` gives the type of each argument by its name."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else kind(n) for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
    )
    return len(triton.compile(source, target=target).asm["cubin"])


def walk(target: GPUTarget) -> int:
    kinds = {"u": "*fp64", "free": "*u8", "tokens": "i32"}
    return size(walk_kernel._signs, lambda name: kinds.get(name, "*fp32"), {"PLACES": 256}, target)


def read(target: GPUTarget, dtype: str, everything: bool) -> int:
    """Size of the decode kernel: for a plain model in one part, or with all options in 8 parts."""
    tensors = dict.fromkeys(["queries", "keys", "values"], f"*{dtype}")
    others = ["a", "b", "bias", "sinks", "tops", "totals"]
    kinds = {**tensors, **dict.fromkeys(others, "*fp32"), "scale": "fp32", "softcap": "fp32"}
    kinds["out"] = "*fp32" if everything else f"*{dtype}"
    constants: dict[str, Any] = {"GROUP": 4, "GROUP_TILE": 16, "WIDEN": False}
    constants |= {"KEY_DIM": 80, "KEY_TILE": 128, "VALUE_DIM": 64, "VALUE_TILE": 64}
    constants |= {"SLOTS_TILE": 64 if dtype == "bf16" else 32, "SPLITS": 8 if everything else 1}
    constants |= dict.fromkeys(["CAPPED", "BIASED", "SUNK"], everything)
    if not everything:
        constants |= dict.fromkeys(["bias", "sinks"])
    return size(decode_kernel._read, lambda name: kinds.get(name, "i32"), constants, target)


def read_coded(target: GPUTarget, dtype: str, keys: str, values: str) -> int:
    """Size of the kernel over quantized slots, with the types of stored keys and values."""
    others = ["mask", "out", "tops", "totals"]
    kinds = {**dict.fromkeys(others, "*fp32"), "queries": f"*{dtype}", "scale": "fp32"}
    kinds |= {"keys": keys, "values": values, "key_peaks": "*bf16", "value_peaks": "*bf16"}
    kinds |= dict.fromkeys(["key_levels", "value_levels"], "fp32")
    constants: dict[str, Any] = {"GROUP": 4, "GROUP_TILE": 16, "WIDEN": False, "MASKED": True}
    constants |= {"KEY_DIM": 80, "KEY_TILE": 128, "VALUE_DIM": 64, "VALUE_TILE": 64}
    constants |= {"SLOTS_TILE": 64, "SPLITS": 8, "GROUPED": 32}
    constants["HALVES"] = keys != values
    return size(quantized_kernel._read, lambda name: kinds.get(name, "i32"), constants, target)


def gather(target: GPUTarget) -> int:
    constants = {"GROUP": 4, "VALUE_DIM": 80, "VALUE_TILE": 128, "SPLITS": 8, "SPLITS_TILE": 8}
    kinds = {"out": "*bf16"}
    return size(decode_kernel._gather, lambda name: kinds.get(name, "*fp32"), constants, target)


if __name__ == "__main__":
    for architecture in sys.argv[1:]:
        target = GPUTarget("cuda", int(architecture), 32)
        print("walk", walk(target))
        print("gather", gather(target))
        for dtype in ("bf16", "fp16", "fp32"):
            print("read", dtype, read(target, dtype, everything=False))
            print("read int8", dtype, read_coded(target, dtype, "*i8", "*i8"))
        print("read k8v4", read_coded(target, "bf16", "*i8", "*u8"))
        print("read fp8", read_coded(target, "bf16", "*u8", "*u8"))
        print("read everything", read(target, "bf16", everything=True))
