"""Products of 5 and more rows with a weight on the CPU, tile by tile.

For each number of a weight that is read there is a multiplication and an addition for every row. To
make them at the pace of the processor, sums have to stay in its registers: a *tile* is the product
of 8 or 16 rows, a vector of them, with 12 lines of the weight. Its 12 vectors of sums fit into
the registers of all processors with vectors of 8 numbers (16 of them, AVX2) and more. In each of
its steps one number of every row is loaded, as one vector, and for each line one number that all
rows share. While a tile is multiplied, the lines of the next are fetched from memory.

Roofline: the larger of the weight's bytes over the bandwidth of memory, and two operations for each
number and row over the processor's pace. Each sum is added up in the order of the line's numbers,
so it does not depend on how many rows there are, or on which.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once_value, for_range_slice

from weir.kernels.cpu.compilation import bytes_at, compile_kernel, floats_at, shorts_at
from weir.kernels.cpu.vectors import (
    BYTE,
    CACHE_LINE,
    LONG,
    add_product,
    as_float,
    broadcast,
    constant,
    floats,
    for_lanes,
    llvm_function,
    load_at,
    pack_rows,
    prefetch,
    store_at,
)

LINES = 12
"""Lines of a weight in a tile; no weight may have fewer."""
_STEPS = 16
"""Steps of a tile in which it reads one line of the processor's cache from each of its lines."""


@llvm_function
def _multiply_tile(
    builder: ir.IRBuilder, x: Any, lines: Any, inputs: Any, sums: Any, ahead: Any, lanes: Any
) -> None:
    """`sums[i, row] = sum over j of x[j, row] * lines[i, j]`.

    numba would make vectors along `j`, whose parts would have to be added up in the end, for each
    sum.

    Args:
        builder: of the code.
        x: address of float32 [inputs, lanes].
        lines: address of float32 [LINES, inputs].
        inputs: of the weight.
        sums: address of float32 [LINES, lanes], which are written.
        ahead: address of what is read next, to be fetched meanwhile; it need not exist.
        lanes: 8 or 16.
    """

    def emit(width: int) -> None:
        total = [alloca_once_value(builder, constant(0.0, width)) for _ in range(LINES)]
        start = floats(builder, lines)
        line = [builder.gep(start, [builder.mul(inputs, LONG(i))]) for i in range(LINES)]

        def step(j: Any) -> None:
            rows = load_at(builder, floats(builder, x), builder.mul(j, LONG(width)), width)
            for i in range(LINES):
                number = builder.load(builder.gep(line[i], [j]))
                add_product(builder, total[i], rows, broadcast(builder, number, width))

        whole, stride = builder.and_(inputs, LONG(-_STEPS)), 4 * LINES
        with for_range_slice(builder, LONG(0), whole, LONG(_STEPS)) as (j, _):
            soon = builder.add(ahead, builder.mul(j, LONG(stride)))
            for offset in range(0, _STEPS * stride, CACHE_LINE):
                place = builder.add(soon, LONG(offset))
                prefetch(builder, builder.inttoptr(place, BYTE.as_pointer()))
            with for_range_slice(builder, LONG(0), LONG(_STEPS), LONG(4)) as (k, _):
                for more in range(4):
                    step(builder.add(j, builder.add(k, LONG(more))))
        with for_range_slice(builder, whole, inputs, LONG(1)) as (j, _):
            step(j)
        for i in range(LINES):
            store_at(builder, builder.load(total[i]), floats(builder, sums), LONG(i * width))

    for_lanes(builder, lanes, emit)


@njit(nogil=True)
def _pack(x: np.ndarray, lanes: int) -> np.ndarray:
    """Rows in panels of `lanes`, or of 8 where that holds the last of them.

    Args:
        x: [rows, inputs].
        lanes: 8 or 16.

    Returns:
        [rows, as a multiple of 8, * inputs]. The panel of row `r` begins at `r * inputs`; rows
        that do not exist are zeros.
    """
    rows, inputs = x.shape
    padded = (rows + 7) // 8 * 8
    packed = np.empty(padded * inputs, np.float32)
    for first in range(0, padded, lanes):
        pack_rows(x, first, min(lanes, padded - first), packed[first * inputs :])
    return packed


@njit(nogil=True)
def _widen(lines: np.ndarray, first: int, wide: np.ndarray) -> None:
    """Lines of a weight from `first` on, as float32."""
    count, inputs = wide.shape
    for i in range(count):
        narrow, line = lines[first + i], wide[i]
        for j in range(inputs):
            line[j] = as_float(narrow[j])


def _tiles(
    widest: int,
    bits: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    added: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """Tile by tile; the last begins earlier where it would not be full, and makes some again.

    An answer is written once and whole: another thread may be making the same one.

    Args:
        widest: 8 or 16.
        bits: of a number of the weight: 32 for float32, 16 for bfloat16, 8 for int8.
        rows, inputs, outputs: how many there are.
        x: address of float32 [rows, inputs].
        weight: address of [outputs, inputs].
        added: address of float32 [outputs], or 0: what is added to sums, or with int8 what they
            are multiplied by.
        out: address of float32 [rows, outputs], of which `start` to `stop` are written.
        start, stop: which outputs.
    """
    bias = factors = floats_at(added, (1, outputs))[0]
    matrix, halves = floats_at(weight, (outputs, inputs)), shorts_at(weight, (outputs, inputs))
    bytes_, found = bytes_at(weight, (outputs, inputs)), floats_at(out, (rows, outputs))
    packed = _pack(floats_at(x, (rows, inputs)), widest)
    sums = np.empty(LINES * widest, np.float32)
    wide = np.empty((0 if bits == 32 else LINES, inputs), np.float32)
    for i in range(start, stop, LINES):
        first = max(0, min(i, stop - LINES))
        lines, ahead = wide.ctypes.data, weight + bits // 8 * (first + LINES) * inputs
        if bits == 32:
            lines = matrix[first].ctypes.data
        elif bits == 16:
            _widen(halves, first, wide)
        else:
            _widen(bytes_, first, wide)
        for begin in range(0, rows, widest):
            panel, lanes = packed[begin * inputs :].ctypes.data, 8 if rows - begin <= 8 else widest
            _multiply_tile(panel, lines, inputs, sums.ctypes.data, ahead, lanes)
            for row in range(begin, min(begin + lanes, rows)):
                for line in range(LINES):
                    total = sums[line * lanes + row - begin]
                    if bits == 8:
                        total *= factors[first + line]
                    elif added:
                        total += bias[first + line]
                    found[row, first + line] = total


tiles = compile_kernel(_tiles)
