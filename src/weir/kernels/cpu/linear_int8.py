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
from numba.core.cgutils import alloca_once_value, for_range_slice

from weir.kernels.cpu.compilation import compile_kernel, floats_at
from weir.kernels.cpu.vectors import (
    BYTE,
    CACHE_LINE,
    INT,
    LONG,
    add_product,
    constant,
    floats,
    llvm_function,
    load_at,
    prefetch,
    shuffle,
    switch,
    vector_at,
    widen,
)

TOGETHER = 4
"""Rows that are multiplied at once, at most."""
_AHEAD = 2**13
"""Bytes from what is read to what is asked for: of 1,024 to 8,192 the fastest here, by a fifth."""
_WIDTH = 16
"""Numbers of a vector; a processor that has none so wide takes two for it."""


@llvm_function
def _multiply_pair(
    builder: ir.IRBuilder, x: Any, one: Any, other: Any, inputs: Any, sums: Any, rows: Any
) -> None:
    """`sums[i, row] = sum over j of x[row, j] * line i[j]` of two lines.

    Args:
        builder: of the code.
        x: address of float32 [rows, inputs].
        one, other: addresses of int8 [inputs], the lines.
        inputs: of the weight.
        sums: address of float32 [2, rows], which are written.
        rows: 1 to `TOGETHER`.
    """

    def emit(count: int) -> None:
        lines = [builder.inttoptr(address, BYTE.as_pointer()) for address in (one, other)]
        start, found = floats(builder, x), floats(builder, sums)
        row_at = [builder.gep(start, [builder.mul(inputs, LONG(row))]) for row in range(count)]
        nothing = constant(0.0, _WIDTH)
        total = {
            (i, row): alloca_once_value(builder, nothing) for i in range(2) for row in range(count)
        }

        def step(j: Any) -> None:
            places = [vector_at(builder, line, j, _WIDTH) for line in lines]
            wide = [widen(builder, builder.load(place, align=1)) for place in places]
            for row in range(count):
                numbers = load_at(builder, row_at[row], j, _WIDTH)
                for i in range(2):
                    add_product(builder, total[i, row], wide[i], numbers)

        aligned = builder.and_(inputs, LONG(-CACHE_LINE))
        vectors = builder.and_(inputs, LONG(-_WIDTH))
        with for_range_slice(builder, LONG(0), aligned, LONG(CACHE_LINE)) as (j, _):
            for line in lines:
                prefetch(builder, builder.gep(line, [builder.add(j, LONG(_AHEAD))]))
            for begin in range(0, CACHE_LINE, _WIDTH):
                step(builder.add(j, LONG(begin)))
        with for_range_slice(builder, aligned, vectors, LONG(_WIDTH)) as (j, _):
            step(j)

        alone = {
            which: alloca_once_value(builder, _add_up(builder, builder.load(place)))
            for which, place in total.items()
        }
        with for_range_slice(builder, vectors, inputs, LONG(1)) as (j, _):
            for i in range(2):
                number = widen(builder, builder.load(builder.gep(lines[i], [j])))
                for row in range(count):
                    given = builder.load(builder.gep(row_at[row], [j]))
                    add_product(builder, alone[i, row], number, given)
        for (i, row), place in alone.items():
            builder.store(builder.load(place), builder.gep(found, [LONG(i * count + row)]))

    switch(builder, rows, range(1, TOGETHER + 1), emit)


def _add_up(builder: ir.IRBuilder, numbers: Any) -> Any:
    """The sum of a vector's numbers: half added to half, until one is left."""
    while numbers.type.count > 1:
        half = numbers.type.count // 2
        halves = range(half), range(half, 2 * half)
        numbers = builder.fadd(*(shuffle(builder, numbers, numbers, at) for at in halves))
    return builder.extract_element(numbers, INT(0))


def _few_rows(
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
            some = min(together, rows - first)
            _multiply_pair(x + 4 * first * inputs, one, other, inputs, to, some)
            for row in range(some):
                found[first + row, i] = sums[row] * scales[0, i]
                found[first + row, far] = sums[some + row] * scales[0, far]


few_rows_int8 = compile_kernel(_few_rows)
