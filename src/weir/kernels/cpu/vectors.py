"""What kernels in LLVM's language share: vectors of as many numbers as one says.

Loops of Python's are made into vectors as LLVM sees fit, and where sums have to stay in registers
it mostly does not. Here parts of a kernel are written out, by way of `numba.extending.intrinsic`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from llvmlite import ir

FLOAT, INT, LONG, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
CACHE_LINE = 64
"""Bytes that come from memory at once."""


@lru_cache
def lanes() -> int:
    """Numbers of a vector: 16 where the processor has 32 registers of so many, or 8."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def vector_at(builder: ir.IRBuilder, start: Any, place: Any, width: int) -> Any:
    """The address of a vector, `place` numbers behind the address `start` of floats."""
    kind = ir.VectorType(FLOAT, width).as_pointer()
    return builder.bitcast(builder.gep(start, [place]), kind)


def everywhere(builder: ir.IRBuilder, number: Any, width: int) -> Any:
    """A vector of one number."""
    vector, whole = ir.VectorType(FLOAT, width), ir.VectorType(INT, width)
    alone = builder.insert_element(ir.Constant(vector, ir.Undefined), number, INT(0))
    return builder.shuffle_vector(alone, alone, ir.Constant(whole, [0] * width))


def add_product(builder: ir.IRBuilder, total: Any, one: Any, other: Any) -> None:
    """Add `one * other` to the sum at the address `total`, in one instruction if there is one."""
    product = builder.fmul(one, other, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def fetch(builder: ir.IRBuilder, place: Any) -> None:
    """Ask for the line of the cache at an address of bytes, which need not exist, to be read."""
    anything = BYTE.as_pointer()
    asks = ir.FunctionType(ir.VoidType(), [anything, INT, INT, INT])
    ask = builder.module.declare_intrinsic("llvm.prefetch", (anything,), asks)
    builder.call(ask, [place, INT(0), INT(2), INT(1)])  # to read, into the second cache


def of_each(builder: ir.IRBuilder, name: str, x: Any) -> Any:
    """One of LLVM's own functions of a vector, such as sqrt or floor."""
    kind = ir.FunctionType(x.type, (x.type,))
    its = f"llvm.{name}.v{x.type.count}f32"
    return builder.call(builder.module.declare_intrinsic(its, (), kind), [x])


def turned(builder: ir.IRBuilder, lines: list[Any]) -> list[Any]:
    """The columns of a square of vectors: blocks beside the diagonal change places, by halves."""
    lines, width, step = list(lines), len(lines), 1
    whole = ir.VectorType(INT, width)
    while step < width:
        for i in range(width):
            if i & step:
                continue
            one, two = lines[i], lines[i + step]
            # Numbers of the second follow those of the first in the index of a shuffle.
            above = [j if not j & step else width + j - step for j in range(width)]
            below = [j + step if not j & step else width + j for j in range(width)]
            lines[i], lines[i + step] = (
                builder.shuffle_vector(one, two, ir.Constant(whole, index))
                for index in (above, below)
            )
        step *= 2
    return lines
