"""Products of a few rows with a weight on the CPU, like `torch.nn.functional.linear`.

A decode step multiplies few rows with every weight, so ideally it takes only the time to read the
weights once, in order. A BLAS is made for many rows, and how close it comes to this with few rows
differs between machines, so `weir.choose_products` measures. Sums are float32, in another order
than PyTorch's. Numbers of bfloat16 and 8 bits are converted to float32 while they are read. There
are three ways to multiply:

- Line by line: for one row, and for a few rows with a weight in float32 or bfloat16. A line has the
  weights of one output.
- Two lines of 8 bits at a time: for a few rows. The next numbers are prefetched, because a
  processor prefetches memory that is read in order, but not beyond the end of a page of 4 KB. With
  576 inputs, for example, a page has only seven lines. Each number is converted to a float once for
  several rows, and multiplied into sums that stay in registers. The order in which a sum is added
  up does not depend on the number of rows or on the place of the line.
- Tile by tile: for 5 or more rows. Each number of a weight is multiplied with every row, and sums
  have to stay in registers so that the processor can do this at full speed. A *tile* is the product
  of a vector of 8 or 16 rows with 12 lines of the weight. Its 12 vectors of sums fit into the
  registers of all processors with AVX2 (16 registers of 8 numbers) or more. Each step of a tile
  loads one number of every row as one vector, and for each line one number that all rows share,
  while the lines of the next tile are fetched from memory. Each sum is added up in the order of the
  line's numbers, so it does not depend on the other rows.

Roofline: the larger of the weight's bytes divided by the memory bandwidth, and two operations for
each number and row divided by the processor's speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once_value, for_range_slice
from torch import Tensor
from torch.nn import functional as F

from weir.kernels.cpu.compilation import (
    ANY_ORDER,
    bytes_at,
    compile_kernel,
    floats_at,
    longs_at,
    shorts_at,
)
from weir.kernels.cpu.threads import TeamKernel, take_part, threads_for
from weir.kernels.cpu.vectors import (
    BYTE,
    CACHE_LINE,
    INT,
    LONG,
    add_product,
    as_float,
    broadcast,
    constant,
    floats,
    for_lanes,
    lanes,
    llvm_function,
    load_at,
    pack_rows,
    prefetch,
    shuffle,
    store_at,
    switch,
    vector_at,
    widen,
)

_WORTH_A_THREAD = 2**15
"""For fewer numbers of a weight than this, a separate thread costs more than it saves."""
_SOME = 5
"""From this number of rows on, tiles are faster than line by line."""
LINES = 12
"""Lines of a weight in a tile; a weight with fewer lines is not multiplied in tiles."""
_STEPS = 16
"""Steps of a tile in which it reads one cache line from each of its lines."""
TOGETHER = 4
"""Largest number of rows that are multiplied at once with two lines of 8 bits."""
_AHEAD = 2**13
"""Distance in bytes at which lines of 8 bits are prefetched. Of 1,024 to 8,192 bytes, this was the
fastest in our measurements, by a fifth.
"""
_WIDTH = 16
"""Numbers in a vector for lines of 8 bits; a processor without such wide vectors uses two."""
_Product = tuple[int, int, int, int, int, int, int]
"""The numbers of rows, inputs and outputs, and four addresses: of the rows, float32 [rows, inputs];
of the weight [outputs, inputs]; of float32 [outputs], which is a bias or, with int8, the scales of
the outputs (0 without a bias); and of the answers, float32 [rows, outputs].
"""


# --- line by line


@njit(nogil=True, fastmath=set(ANY_ORDER))
def _two_products(a: np.ndarray, b: np.ndarray, row: np.ndarray) -> tuple[np.float32, np.float32]:
    """Compute the inner products of two lines, as they are stored, with a row."""
    p = q = np.float32(0.0)
    for j in range(row.shape[0]):
        p += as_float(a[j]) * row[j]
        q += as_float(b[j]) * row[j]
    return p, q


def _one_row(bits: int, product: _Product, start: int, stop: int) -> None:
    """Multiply one row with two lines at a time.

    The two lines are far from each other, because processors prefetch memory that is read in order,
    and two such streams are faster than one. If the number of lines is odd, the last is read twice.

    All ways to multiply are called with integers, because numba takes longer to unpack arrays than
    to multiply with a small weight.

    Args:
        bits: bits of a number of the weight: 32 for float32, 16 for bfloat16, 8 for int8.
        product: sizes and addresses.
        start, stop: the outputs that are written.
    """
    rows, inputs, outputs, x, weight, added, out = product
    row, found = floats_at(x, (rows, inputs))[0], floats_at(out, (rows, outputs))[0]
    bias = factors = floats_at(added, (1, outputs))[0]
    matrix, halves = floats_at(weight, (outputs, inputs)), shorts_at(weight, (outputs, inputs))
    bytes_ = bytes_at(weight, (outputs, inputs))
    half = (stop - start + 1) // 2
    for i in range(start, start + half):
        far = min(i + half, stop - 1)
        if bits == 32:
            p, q = _two_products(matrix[i], matrix[far], row)
        elif bits == 16:
            p, q = _two_products(halves[i], halves[far], row)
        else:
            p, q = _two_products(bytes_[i], bytes_[far], row)
            found[i], found[far] = p * factors[i], q * factors[far]
            continue
        found[i] = p + bias[i] if added else p
        found[far] = q + bias[far] if added else q


def _few_rows(bits: int, product: _Product, start: int, stop: int) -> None:
    """Do the same as `_one_row` for a few rows and float32 or bfloat16: multiply row by row with
    each line, which stays in the cache after the first row.
    """
    rows, inputs, outputs, x, weight, added, out = product
    given, found = floats_at(x, (rows, inputs)), floats_at(out, (rows, outputs))
    halves = shorts_at(weight, (outputs, inputs))
    bias, wide = floats_at(added, (1, outputs)), np.empty(inputs, np.float32)
    for i in range(start, stop):
        line_at = weight + 4 * inputs * i
        if bits == 16:
            line_at, narrow = wide.ctypes.data, halves[i]
            for j in range(inputs):
                wide[j] = as_float(narrow[j])
        line = floats_at(line_at, (1, inputs))[0]
        for r in range(rows):
            row = given[r]
            total = np.float32(0.0)
            for j in range(inputs):
                total += line[j] * row[j]
            found[r, i] = total + bias[0, i] if added else total


# --- two lines of 8 bits at a time


@llvm_function
def _multiply_pair(
    builder: ir.IRBuilder, x: Any, one: Any, other: Any, inputs: Any, sums: Any, rows: Any
) -> None:
    """Compute `sums[i, row] = sum over j of x[row, j] * line i[j]` for two lines.

    Args:
        builder: builds the code.
        x: address of float32 [rows, inputs].
        one, other: addresses of the lines, int8 [inputs].
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
    """Compute the sum of a vector's numbers by adding one half to the other until one number is
    left.
    """
    while numbers.type.count > 1:
        half = numbers.type.count // 2
        halves = range(half), range(half, 2 * half)
        numbers = builder.fadd(*(shuffle(builder, numbers, numbers, at) for at in halves))
    return builder.extract_element(numbers, INT(0))


def _few_rows_int8(together: int, product: _Product, start: int, stop: int) -> None:
    """Do the same as `_one_row` for int8 and up to `together` rows at once, at most `TOGETHER`."""
    rows, inputs, outputs, x, numbers, scale, out = product
    scales, found = floats_at(scale, (1, outputs)), floats_at(out, (rows, outputs))
    sums = np.empty(2 * TOGETHER, np.float32)
    half = (stop - start + 1) // 2
    for i in range(start, start + half):
        far = min(i + half, stop - 1)  # if odd, the last is computed twice
        one, other, to = numbers + i * inputs, numbers + far * inputs, sums.ctypes.data
        for first in range(0, rows, together):
            some = min(together, rows - first)
            _multiply_pair(x + 4 * first * inputs, one, other, inputs, to, some)
            for row in range(some):
                found[first + row, i] = sums[row] * scales[0, i]
                found[first + row, far] = sums[some + row] * scales[0, far]


# --- tile by tile


@llvm_function
def _multiply_tile(
    builder: ir.IRBuilder, x: Any, lines: Any, inputs: Any, sums: Any, ahead: Any, lanes: Any
) -> None:
    """Compute `sums[i, row] = sum over j of x[j, row] * lines[i, j]`.

    numba would make vectors along `j`, whose parts would have to be added up at the end of each
    sum.

    Args:
        builder: builds the code.
        x: address of float32 [inputs, lanes].
        lines: address of float32 [LINES, inputs].
        inputs: of the weight.
        sums: address of float32 [LINES, lanes], which are written.
        ahead: address of the memory that is read next, which is prefetched; it does not have to
            exist.
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
    """Arrange rows in panels of `lanes`, or of 8 if the last rows fit in 8.

    Args:
        x: [rows, inputs].
        lanes: 8 or 16.

    Returns:
        [rows * inputs], with rows rounded up to a multiple of 8. The panel of row `r` begins at `r
        * inputs`; rows that do not exist are zeros.
    """
    rows, inputs = x.shape
    padded = (rows + 7) // 8 * 8
    packed = np.empty(padded * inputs, np.float32)
    for first in range(0, padded, lanes):
        pack_rows(x, first, min(lanes, padded - first), packed[first * inputs :])
    return packed


@njit(nogil=True)
def _widen(lines: np.ndarray, first: int, wide: np.ndarray) -> None:
    """Convert the lines of a weight from `first` on to float32."""
    count, inputs = wide.shape
    for i in range(count):
        narrow, line = lines[first + i], wide[i]
        for j in range(inputs):
            line[j] = as_float(narrow[j])


def _tiles(widest: int, bits: int, product: _Product, start: int, stop: int) -> None:
    """Multiply tile by tile. If the last tile would not be full, it begins earlier and computes
    some outputs again.

    An answer is written in one store, because another thread may be writing the same one.

    Args:
        widest: 8 or 16.
        bits, product, start, stop: as for `_one_row`.
    """
    rows, inputs, outputs, x, weight, added, out = product
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


# --- the choice of a way


_compiled_one_row, _compiled_few_rows = (
    compile_kernel(way, fastmath=ANY_ORDER) for way in (_one_row, _few_rows)
)
_compiled_few_rows_int8, _compiled_tiles = compile_kernel(_few_rows_int8), compile_kernel(_tiles)


_ONE, _TILES, _FEW, _FEW_INT8 = range(4)
"""The ways to multiply."""


def way_of(rows: int, bits: int, outputs: int) -> tuple[int, int]:
    """Choose how to multiply some rows with a weight. Returns `way` and `first`, arguments of
    `multiply_part`.
    """
    if rows == 1:
        return _ONE, bits
    if rows >= _SOME and outputs >= LINES:
        return _TILES, lanes() << 8 | bits
    # With 8 bits, as many rows as the registers have room for, with the sums of two lines.
    return (_FEW, bits) if bits > 8 else (_FEW_INT8, lanes() // 4)


@njit(nogil=True)
def multiply_part(
    way: int,
    first: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    added: int,
    out: int,
    part: int,
    parts: int,
) -> tuple[int, int]:
    """Multiply with one of `parts` parts of a weight; returns the range of its outputs.

    `way` and `first` come from `way_of`; the other arguments are those of a `_Product`.
    """
    # Parts consist of whole tiles, except for the remainder.
    whole = outputs // LINES
    start = LINES * (whole * part // parts)
    stop = LINES * (whole * (part + 1) // parts) if part + 1 < parts else outputs
    if start < stop:
        product = (rows, inputs, outputs, x, weight, added, out)
        if way == _ONE:
            _compiled_one_row(first, product, start, stop)
        elif way == _TILES:
            _compiled_tiles(first >> 8, first & 255, product, start, stop)
        elif way == _FEW:
            _compiled_few_rows(first, product, start, stop)
        else:
            _compiled_few_rows_int8(first, product, start, stop)
    return start, stop


def _multiply_parts(address: int) -> None:
    """Multiply part after part; threads share the parts."""
    n = longs_at(address, (1, 11))[0]
    part = take_part(address)
    while part < n[1]:
        multiply_part(n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], part, n[1])
        part = take_part(address)


_multiply_together = TeamKernel(_multiply_parts)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear` without gradients. Invalid arguments raise PyTorch's own
    errors.

    Args:
        x: [..., inputs], of the weight's type.
        weight: [outputs, inputs], float32 or bfloat16, on the CPU; copied if not contiguous.
        bias: [outputs], or None.

    Returns:
        [..., outputs], of the weight's type.
    """
    out = _multiply(x, weight, None, bias)
    if out is None:
        return F.linear(x, weight, bias)
    return out.to(torch.bfloat16) if weight.dtype is torch.bfloat16 else out


def linear_int8(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """Compute `torch.nn.functional.linear` with a weight of 8 bits, `numbers * scale[:, None]`.

    Args:
        x: [..., inputs], float32 or bfloat16, without gradients.
        numbers: [outputs, inputs], int8, on the CPU; copied if not contiguous.
        scale: [outputs].

    Returns:
        [..., outputs], of the type of `x`.
    """
    out = _multiply(x, numbers, scale, None)
    if out is None:
        return F.linear(x, numbers.to(x.dtype) * scale.to(x.dtype)[:, None])
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def _multiply(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Compute the product in float32. Returns None if PyTorch must compute it or raise its error.

    It must if a size is 0, the bias is not on the CPU, or sizes do not match, which compiled code
    that only gets addresses would not notice.
    """
    outputs, inputs = weight.shape
    *before, width = x.shape or (0,)
    added = bias if scale is None else scale
    if width != inputs or not (inputs and outputs):
        return None
    if added is not None:
        if not added.is_cpu or added.shape != (outputs,):
            return None
        added = _as_floats(added)
    rows, bits = x.numel() // inputs, 8 * weight.itemsize
    x, weight = _as_floats(x), weight.contiguous()
    out = x.new_empty((*before, outputs))
    _multiply_together(
        threads_for(outputs * inputs, _WORTH_A_THREAD),
        *way_of(rows, bits, outputs),
        rows,
        inputs,
        outputs,
        x.data_ptr(),
        weight.data_ptr(),
        0 if added is None else added.data_ptr(),
        out.data_ptr(),
    )
    return out


def _as_floats(t: Tensor) -> Tensor:
    """Convert a tensor to the form that kernels read by address: float32 and contiguous."""
    return t if t.dtype is torch.float32 and t.is_contiguous() else t.float().contiguous()
