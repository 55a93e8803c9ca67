"""Products of some rows with a weight on the CPU, so many that arithmetic takes as long as reading.

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
from numba import njit, types
from numba.core.cgutils import alloca_once_value, for_range_slice
from numba.extending import intrinsic

from weir.kernels.cpu.compilation import bytes_at, compiled, floats_at, shorts_at
from weir.kernels.cpu.vectors import (
    BYTE,
    CACHE_LINE,
    FLOAT,
    LONG,
    add_product,
    everywhere,
    fetch,
    vector_at,
)

LINES = 12
"""Lines of a weight in a tile; no weight may have fewer."""
_STEPS = 16
"""Steps of a tile in which it reads one line of the processor's cache from each of its lines."""


@intrinsic(prefer_literal=True)
def _tile(typing: Any, x: Any, lines: Any, inputs: Any, sums: Any, ahead: Any, lanes: Any) -> Any:
    """`sums[i, row] = sum over j of x[j, row] * lines[i, j]`, written in LLVM's language.

    There vectors have as many numbers as one says; loops of Python's are made into vectors along
    `j`, whose parts would have to be added up in the end, for each sum.

    Args:
        typing: of the call; numba's.
        x: address of float32 [inputs, lanes].
        lines: address of float32 [LINES, inputs].
        inputs: of the weight.
        sums: address of float32 [LINES, lanes], which are written.
        ahead: address of what is read next, to be fetched meanwhile; it need not exist.
        lanes: 8 or 16, a constant.
    """
    width, stride = lanes.literal_value, LINES * 4
    vector = ir.VectorType(FLOAT, width)
    signature = types.void(*[types.uintp] * 5, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        count = given[2]
        x_at, lines_at, sums_at = (
            builder.inttoptr(given[place], FLOAT.as_pointer()) for place in (0, 1, 3)
        )
        nothing = ir.Constant(vector, [0.0] * width)
        total = [alloca_once_value(builder, nothing) for _ in range(LINES)]
        line = [builder.gep(lines_at, [builder.mul(count, LONG(i))]) for i in range(LINES)]

        def group(start: Any, index: Any) -> Any:
            return vector_at(builder, start, builder.mul(index, LONG(width)), width)

        def step(j: Any) -> None:
            rows = builder.load(group(x_at, j), align=4)
            for i in range(LINES):
                number = builder.load(builder.gep(line[i], [j]))
                add_product(builder, total[i], rows, everywhere(builder, number, width))

        whole = builder.and_(count, LONG(-_STEPS))
        with for_range_slice(builder, LONG(0), whole, LONG(_STEPS)) as (j, _):
            soon = builder.add(given[4], builder.mul(j, LONG(stride)))
            for start in range(0, _STEPS * stride, CACHE_LINE):
                place = builder.add(soon, LONG(start))
                fetch(builder, builder.inttoptr(place, BYTE.as_pointer()))
            with for_range_slice(builder, LONG(0), LONG(_STEPS), LONG(4)) as (k, _):
                for more in range(4):
                    step(builder.add(j, builder.add(k, LONG(more))))
        with for_range_slice(builder, whole, count, LONG(1)) as (j, _):
            step(j)
        for i in range(LINES):
            builder.store(builder.load(total[i]), group(sums_at, LONG(i)), align=4)
        return context.get_dummy_value()

    return signature, write


@njit(nogil=True)
def _packed(x: np.ndarray, widest: int) -> np.ndarray:
    """Rows as tiles read them: in groups of `widest` or of 8, whose numbers lie side by side.

    Args:
        x: [rows, inputs].
        widest: 8 or 16.

    Returns:
        [rows, as a multiple of 8, * inputs]. The group of row `r` begins at `r * inputs`; rows
        that do not exist are zeros.
    """
    rows, inputs = x.shape
    padded = (rows + 7) // 8 * 8
    packed = np.zeros(padded * inputs, np.float32)
    for first in range(0, padded, widest):
        lanes = min(widest, padded - first)
        group = packed[first * inputs :]
        for lane in range(min(lanes, rows - first)):
            row = x[first + lane]
            for j in range(inputs):
                group[j * lanes + lane] = row[j]
    return packed


@njit(nogil=True)
def _times(
    packed: np.ndarray,
    lines: np.ndarray,
    ahead: int,
    scale: np.ndarray,
    bias: np.ndarray,
    widest: int,
    sums: np.ndarray,
    out: np.ndarray,
) -> None:
    """All rows with the lines of one tile.

    An answer is written once and whole: another thread may be making the same one.

    Args:
        packed: of `_packed`.
        lines: float32 [LINES, inputs].
        ahead: address of the next tile's lines.
        scale: what the sums of each line are multiplied with [LINES], or empty.
        bias: what is added [LINES], or empty.
        widest: 8 or 16.
        sums: room for LINES * widest sums.
        out: [rows, LINES], which are written.
    """
    rows, inputs = out.shape[0], lines.shape[1]
    for first in range(0, rows, widest):
        group, lanes = packed[first * inputs :].ctypes.data, 8 if rows - first <= 8 else widest
        if lanes == 8:
            _tile(group, lines.ctypes.data, inputs, sums.ctypes.data, ahead, 8)
        else:
            _tile(group, lines.ctypes.data, inputs, sums.ctypes.data, ahead, 16)
        for row in range(first, min(first + lanes, rows)):
            for i in range(LINES):
                total = sums[i * lanes + row - first]
                if scale.shape[0]:
                    total *= scale[i]
                out[row, i] = total + bias[i] if bias.shape[0] else total


def _tiles(
    widest: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """Tile by tile; the last begins earlier where it would not be full, and makes some again.

    Args:
        widest: 8 or 16.
        rows, inputs, outputs: how many there are.
        x: address of float32 [rows, inputs].
        weight: address of [outputs, inputs].
        bias: address of float32 [outputs], or 0.
        out: address of float32 [rows, outputs], of which `start` to `stop` are written.
        start, stop: which outputs.
    """
    added, none = floats_at(bias, (1, outputs if bias else 0))[0], np.empty(0, np.float32)
    matrix, found = floats_at(weight, (outputs, inputs)), floats_at(out, (rows, outputs))
    packed = _packed(floats_at(x, (rows, inputs)), widest)
    sums = np.empty(LINES * widest, np.float32)
    for i in range(start, stop, LINES):
        first = max(0, min(i, stop - LINES))
        last = first + LINES
        lines, ahead = matrix[first:last], weight + 4 * last * inputs
        _times(packed, lines, ahead, none, added[first:last], widest, sums, found[:, first:last])


def _tiles_of_halves(
    widest: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """The weight as bits of bfloat16, which are the upper half of those of a float32."""
    added, none = floats_at(bias, (1, outputs if bias else 0))[0], np.empty(0, np.float32)
    matrix, found = shorts_at(weight, (outputs, inputs)), floats_at(out, (rows, outputs))
    packed = _packed(floats_at(x, (rows, inputs)), widest)
    sums = np.empty(LINES * widest, np.float32)
    bits = np.empty((LINES, inputs), np.int32)
    lines = bits.view(np.float32)
    for i in range(start, stop, LINES):
        first = max(0, min(i, stop - LINES))
        last = first + LINES
        for line in range(LINES):
            halves, wide = matrix[first + line], bits[line]
            for j in range(inputs):
                wide[j] = np.int32(halves[j]) << np.int32(16)
        ahead = weight + 2 * last * inputs
        _times(packed, lines, ahead, none, added[first:last], widest, sums, found[:, first:last])


def _tiles_of_bytes(
    widest: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    scale: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """The weight as whole numbers of 8 bits, each line with a scale: float32 [outputs]."""
    scales, none = floats_at(scale, (1, outputs))[0], np.empty(0, np.float32)
    matrix, found = bytes_at(weight, (outputs, inputs)), floats_at(out, (rows, outputs))
    packed = _packed(floats_at(x, (rows, inputs)), widest)
    sums = np.empty(LINES * widest, np.float32)
    lines = np.empty((LINES, inputs), np.float32)
    for i in range(start, stop, LINES):
        first = max(0, min(i, stop - LINES))
        last = first + LINES
        for line in range(LINES):
            numbers, wide = matrix[first + line], lines[line]
            for j in range(inputs):
                wide[j] = np.float32(numbers[j])
        ahead, scaled = weight + last * inputs, scales[first:last]
        _times(packed, lines, ahead, scaled, none, widest, sums, found[:, first:last])


tiles, tiles_of_halves, tiles_of_bytes = (
    compiled(way) for way in (_tiles, _tiles_of_halves, _tiles_of_bytes)
)
