"""Products of a few rows with a weight of whole numbers of 8 bits on the CPU.

Two lines of the weight are read at a time, far from each other, and what comes next is asked for
before it is needed: a processor fetches ahead what is read in order, but not past the end of a page
of 4 KB, which is seven lines of 576 numbers. Each number is made a float once, for all rows, and
multiplied into sums that stay in registers. Sums are float32, each of them added up in an order of
its own: it does not depend on how many rows there are, nor on where the line lies.

Roofline: the bytes of the weight over the bandwidth of memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range_slice
from numba.extending import intrinsic

from weir.kernels.cpu.compilation import compiled, floats_at
from weir.kernels.cpu.vectors import (
    BYTE,
    CACHE_LINE,
    FLOAT,
    INT,
    LONG,
    add_product,
    fetch,
    vector_at,
)

TOGETHER = 4
"""Rows that are multiplied at once, at most."""
_AHEAD = 2**13
"""Bytes from what is read to what is asked for: of 1,024 to 8,192 the fastest here, by a fifth."""
_WIDTH = 16
"""Numbers of a vector; a processor that has none so wide takes two for it."""


@intrinsic(prefer_literal=True)
def _pair(typing: Any, x: Any, one: Any, other: Any, inputs: Any, sums: Any, rows: Any) -> Any:
    """`sums[i, row] = sum over j of x[row, j] * line i[j]` of two lines, in LLVM's language.

    Args:
        typing: of the call; numba's.
        x: address of float32 [rows, inputs].
        one, other: addresses of int8 [inputs], the lines.
        inputs: of the weight.
        sums: address of float32 [2, rows], which are written.
        rows: 1 to `TOGETHER`, a constant.
    """
    count = rows.literal_value
    vector = ir.VectorType(FLOAT, _WIDTH)
    whole = ir.VectorType(INT, _WIDTH)
    packed = ir.VectorType(BYTE, _WIDTH)
    signature = types.void(*[types.uintp] * 5, rows)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        length = given[3]
        x_at, sums_at = (builder.inttoptr(given[place], FLOAT.as_pointer()) for place in (0, 4))
        lines = [builder.inttoptr(given[place], BYTE.as_pointer()) for place in (1, 2)]
        row_at = [builder.gep(x_at, [builder.mul(length, LONG(row))]) for row in range(count)]
        nothing = ir.Constant(vector, [0.0] * _WIDTH)
        total = {
            (i, row): alloca_once_value(builder, nothing) for i in range(2) for row in range(count)
        }

        def step(j: Any) -> None:
            read = [builder.bitcast(builder.gep(line, [j]), packed.as_pointer()) for line in lines]
            wide = [
                builder.sitofp(builder.sext(builder.load(it, align=1), whole), vector)
                for it in read
            ]
            for row in range(count):
                numbers = builder.load(vector_at(builder, row_at[row], j, _WIDTH), align=4)
                for i in range(2):
                    add_product(builder, total[i, row], wide[i], numbers)

        aligned = builder.and_(length, LONG(-CACHE_LINE))
        vectors = builder.and_(length, LONG(-_WIDTH))
        with for_range_slice(builder, LONG(0), aligned, LONG(CACHE_LINE)) as (j, _):
            for line in lines:
                fetch(builder, builder.gep(line, [builder.add(j, LONG(_AHEAD))]))
            for start in range(0, CACHE_LINE, _WIDTH):
                step(builder.add(j, LONG(start)))
        with for_range_slice(builder, aligned, vectors, LONG(_WIDTH)) as (j, _):
            step(j)

        alone = {
            which: alloca_once_value(builder, _added_up(builder, builder.load(place)))
            for which, place in total.items()
        }
        with for_range_slice(builder, vectors, length, LONG(1)) as (j, _):
            for i in range(2):
                number = builder.sitofp(builder.load(builder.gep(lines[i], [j])), FLOAT)
                for row in range(count):
                    its = builder.load(builder.gep(row_at[row], [j]))
                    add_product(builder, alone[i, row], number, its)
        for (i, row), place in alone.items():
            builder.store(builder.load(place), builder.gep(sums_at, [LONG(i * count + row)]))
        return context.get_dummy_value()

    return signature, write


def _added_up(builder: ir.IRBuilder, numbers: Any) -> Any:
    """The sum of a vector's numbers: half added to half, until one is left."""
    width = _WIDTH
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                numbers,
                ir.Constant(numbers.type, ir.Undefined),
                ir.Constant(ir.VectorType(INT, width), list(range(start, start + width))),
            )
            for start in (0, width)
        ]
        numbers = builder.fadd(*halves)
    return builder.extract_element(numbers, INT(0))


def _few_of_bytes(
    together: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    numbers: int,
    scale: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """Some outputs of all rows.

    Args:
        together: rows at once, up to `TOGETHER`.
        rows, inputs, outputs: how many there are.
        x: address of float32 [rows, inputs].
        numbers: address of int8 [outputs, inputs].
        scale: address of float32 [outputs].
        out: address of float32 [rows, outputs], of which `start` to `stop` are written.
        start, stop: which outputs.
    """
    scales, found = floats_at(scale, (1, outputs)), floats_at(out, (rows, outputs))
    sums = np.empty(2 * TOGETHER, np.float32)
    half = (stop - start + 1) // 2
    for i in range(start, start + half):
        far = min(i + half, stop - 1)  # of an odd number the last is made twice
        one, other, to = numbers + i * inputs, numbers + far * inputs, sums.ctypes.data
        for first in range(0, rows, together):
            some, at = min(together, rows - first), x + 4 * first * inputs
            if some == 1:
                _pair(at, one, other, inputs, to, 1)
            elif some == 2:
                _pair(at, one, other, inputs, to, 2)
            elif some == 3:
                _pair(at, one, other, inputs, to, 3)
            else:
                _pair(at, one, other, inputs, to, 4)
            for row in range(some):
                found[first + row, i] = sums[row] * scales[0, i]
                found[first + row, far] = sums[some + row] * scales[0, far]


few_of_bytes = compiled(_few_of_bytes)
