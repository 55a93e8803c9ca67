"""Vectors side by side in *panels*, and the inner products of two panels, tile by tile.

A panel has as many vectors as the processor's have lanes, number by number: what is at place
`i * lanes + lane` is number `i` of vector `lane`. A tile has the products of all vectors of one
panel with all of another; its sums stay in registers until they are done, each in the order of a
vector's numbers. Roofline: a product and a sum for each number of each pair, at the pace of the
processor.

Written in LLVM's language, where vectors have as many numbers as one says (`linear_tiles`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic

from weir.kernels.cpu.vectors import FLOAT, LONG, everywhere, turned, vector_at

MATH = ("contract",)
"""What LLVM may do to sums and products: round once where both go together."""


def products(builder: ir.IRBuilder, x: Any, numbers: Any, count: Any, step: Any, width: int) -> Any:
    """`total[i] = sum over j of x[j] * numbers[j * step + i]`, as many vectors as one has lanes.

    Args:
        builder: of the code.
        x: address of vectors [count].
        numbers: address of floats, `step` from one `j` to the next.
        count, step: 64-bit numbers.
        width: lanes of a vector.
    """
    nothing = ir.Constant(ir.VectorType(FLOAT, width), [0.0] * width)
    total = [alloca_once_value(builder, nothing) for _ in range(width)]
    for sums in total:
        builder.store(nothing, sums)
    with for_range(builder, count) as loop:
        factor = builder.load(
            vector_at(builder, x, builder.mul(loop.index, LONG(width)), width), align=4
        )
        line = builder.gep(numbers, [builder.mul(loop.index, step)])
        for i, sums in enumerate(total):
            number = everywhere(builder, builder.load(builder.gep(line, [LONG(i)])), width)
            product = builder.fmul(factor, number, flags=MATH)
            builder.store(builder.fadd(builder.load(sums), product, flags=MATH), sums)
    return [builder.load(sums) for sums in total]


@intrinsic(prefer_literal=True)
def _pack(typing: Any, lines: Any, step: Any, out: Any, factor: Any, lanes: Any) -> Any:
    """`out[i, lane] = lines[lane, i] * factor` for a square of numbers.

    Args:
        typing: of the call; numba's.
        lines: address of float32, `step` numbers from a line to the next.
        step: how many.
        out: address of float32 [lanes, lanes], which are written.
        factor: float32.
        lanes: 8 or 16, a constant.
    """
    width = lanes.literal_value
    signature = types.void(types.uintp, types.intp, types.uintp, types.float32, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        lines_at, out_at = (builder.inttoptr(given[i], FLOAT.as_pointer()) for i in (0, 2))
        factor = everywhere(builder, given[3], width)
        read = [
            builder.load(
                vector_at(builder, lines_at, builder.mul(given[1], LONG(i)), width), align=4
            )
            for i in range(width)
        ]
        for i, line in enumerate(turned(builder, read)):
            at = vector_at(builder, out_at, LONG(i * width), width)
            builder.store(builder.fmul(line, factor), at, align=4)
        return context.get_dummy_value()

    return signature, write


@intrinsic(prefer_literal=True)
def multiply(typing: Any, x: Any, numbers: Any, count: Any, step: Any, out: Any, lanes: Any) -> Any:
    """`products` into `out`, float32 [lanes, lanes]; arguments as there, by address."""
    width = lanes.literal_value
    signature = types.void(*[types.uintp] * 5, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        x_at, numbers_at, out_at = (
            builder.inttoptr(given[i], FLOAT.as_pointer()) for i in (0, 1, 4)
        )
        for i, total in enumerate(products(builder, x_at, numbers_at, given[2], given[3], width)):
            builder.store(total, vector_at(builder, out_at, LONG(i * width), width), align=4)
        return context.get_dummy_value()

    return signature, write


@njit(nogil=True)
def packed(
    lines: np.ndarray, at: int, step: int, dim: int, factor: float, widest: int, out: np.ndarray
) -> None:
    """Lines from place `at` on, number by number side by side: out[i * widest + lane]."""
    scale = np.float32(factor)
    start, to = lines[at:].ctypes.data, out.ctypes.data
    done = dim - dim % widest
    for first in range(0, done, widest):
        if widest == 16:
            _pack(start + 4 * first, step, to + 4 * first * widest, scale, 16)
        else:
            _pack(start + 4 * first, step, to + 4 * first * widest, scale, 8)
    for i in range(done, dim):
        for lane in range(widest):
            out[i * widest + lane] = lines[at + lane * step + i] * scale
