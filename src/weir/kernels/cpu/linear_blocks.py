"""Products with weights in GGUF's blocks of 32 numbers of 8 or 4 bits on the CPU.

Rows are quantized to 8 bits, block by block, and multiplied as whole numbers, which are added up by
fours: with AVX-512 VNNI 64 products an instruction, with AVX2 32 in a few. What llama.cpp does with
these formats too; it is the only way in which a processor multiplies several rows faster than in
float32, and one row at the pace of memory. Whole sums are exact, so both ways give the same.

A weight lies in *panels* of 16 outputs, so that sums of 16 outputs are one vector or two: of each
block first the numbers 0 to 3 of all outputs, then 4 to 7. With 4 bits a byte has the number of
group `g` below and that of group `g + 4` above.

Roofline: the larger of the weight's bytes over the bandwidth of memory, and 128 operations a cycle
(AVX2: 64).
"""

from __future__ import annotations

import os
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once, alloca_once_value, for_range
from torch import Tensor

from weir.kernels.cpu.compilation import compile_kernel, floats_at, keep, longs_at
from weir.kernels.cpu.threads import PARTS, TeamKernel, take_part, threads_for
from weir.kernels.cpu.vectors import (
    BYTE,
    FLOAT,
    INT,
    LONG,
    broadcast,
    call_for_each,
    constant,
    floats,
    lanes,
    llvm_function,
    load_at,
    multiply_add,
    prefetch,
    shuffle,
    store_at,
    switch,
)
from weir.kernels.dispatch import BLOCK, PANEL

LEAST_TOGETHER, MOST_TOGETHER = 32, 64
"""Rows that a thread rounds and takes through a weight: few stay near, many read it seldom."""
_GROUPS = BLOCK // 4
_HALF = ir.HalfType()
_WORTH_A_THREAD = 2**16
"""Products of numbers below which a thread of their own costs more than it saves."""
_AHEAD = 2**12
"""Bytes from what one row reads to what is asked for."""


_FEATURES = llvmlite.binding.get_host_cpu_features()
_OTHER_PROCESSOR = os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES")
_VNNI = lanes() == PANEL and bool(_FEATURES.get("avx512vnni"))
_NEEDED = ("avx512vnni",) if _VNNI else ("avx2", "fma", "f16c")
SUPPORTED = not _OTHER_PROCESSOR and all(_FEATURES.get(name) for name in _NEEDED)
"""Whether numba compiles for a processor with VNNI on vectors of 64 bytes, or one with AVX2."""
_LANES = PANEL if _VNNI else PANEL // 2
"""Whole sums of a vector."""
TOGETHER = 8 if _VNNI else 4
"""Rows multiplied at once, at most: so many whole sums of a panel fit into registers."""
_INTS, _SHORTS, _BYTES = (ir.VectorType(ir.IntType(32 // n), n * _LANES) for n in (1, 2, 4))


def _bytes(builder: ir.IRBuilder, address: Any, place: Any) -> Any:
    return builder.gep(builder.inttoptr(address, BYTE.as_pointer()), [place])


def _ints(builder: ir.IRBuilder, pointer: Any) -> Any:
    """A vector of numbers of 32 bits at a pointer."""
    return builder.load(builder.bitcast(pointer, _INTS.as_pointer()), align=1)


def _spread(builder: ir.IRBuilder, number: Any) -> Any:
    """A vector of one number of 32 bits."""
    alone = builder.insert_element(ir.Constant(_INTS, ir.Undefined), number, INT(0))
    return builder.shuffle_vector(alone, alone, ir.Constant(_INTS, [0] * _LANES))


def _halves(builder: ir.IRBuilder, address: Any, place: Any) -> Any:
    """Numbers of float16 as float32, `place` numbers behind an address."""
    start = builder.gep(builder.inttoptr(address, _HALF.as_pointer()), [place])
    vector = builder.bitcast(start, ir.VectorType(_HALF, _LANES).as_pointer())
    return builder.fpext(builder.load(vector, align=2), ir.VectorType(FLOAT, _LANES))


def _instruction(builder: ir.IRBuilder, name: str, result: Any, *given: Any) -> Any:
    """Emit an x86 instruction on vectors, by the name of its LLVM intrinsic."""
    kind = ir.FunctionType(result, [value.type for value in given])
    return builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), given)


class _WholeSums:
    """Whole sums of a block's codes times the numbers of some rows.

    VNNI adds unsigned codes times signed numbers, by fours, in 32 bits. AVX2 adds pairs of them in
    16 bits. Those of codes of 4 bits stay there until a block is done. Of 8 bits, two would not
    fit: codes are signed then, and the sign goes from the code to what it is multiplied with.

    Attributes:
        signed: codes are multiplied less their zero of 128, which is not to be taken off after.

    Args:
        builder: of the code.
        bits: of a code.
        count: of sums.
    """

    def __init__(self, builder: ir.IRBuilder, bits: int, count: int) -> None:
        self._builder, self.signed = builder, bits == 8 and not _VNNI
        self._in_16_bits = bits == 4 and not _VNNI
        nothing = ir.Constant(_SHORTS if self._in_16_bits else _INTS, None)
        self._sums = [alloca_once(builder, nothing.type) for _ in range(count)]
        for total in self._sums:
            builder.store(nothing, total)

    def read(self, codes: Any) -> list[Any]:
        """A vector of codes as `add` takes it."""
        if not self.signed:
            return [codes]
        builder = self._builder
        signed = builder.bitcast(builder.xor(codes, constant(-0x7F7F7F80, _LANES, INT)), _BYTES)
        negative = builder.icmp_signed("<", signed, ir.Constant(_BYTES, None))
        size = builder.select(negative, builder.sub(ir.Constant(_BYTES, None), signed), signed)
        return [size, signed]

    def add(self, which: int, codes: list[Any], numbers: Any) -> None:
        """Add products of codes with the same four numbers for each output."""
        builder, place = self._builder, self._sums[which]
        total = builder.load(place)
        if _VNNI:
            found = _instruction(builder, "avx512.vpdpbusd.512", _INTS, total, codes[0], numbers)
            builder.store(found, place)
            return
        numbers = builder.bitcast(numbers, _BYTES)
        if self.signed:
            numbers = _instruction(builder, "avx2.psign.b", _BYTES, numbers, codes[1])
        own = builder.bitcast(codes[0], _BYTES)
        pairs = _instruction(builder, "avx2.pmadd.ub.sw", _SHORTS, own, numbers)
        more = pairs if self._in_16_bits else self._by_fours(pairs)
        builder.store(builder.add(total, more), place)

    def total(self, which: int) -> Any:
        """One of the sums, in 32 bits."""
        total = self._builder.load(self._sums[which])
        return self._by_fours(total) if self._in_16_bits else total

    def _by_fours(self, pairs: Any) -> Any:
        ones = ir.Constant(_SHORTS, [1] * (2 * _LANES))
        return _instruction(self._builder, "avx2.pmadd.wd", _INTS, pairs, ones)


@llvm_function
def _multiply_panel(
    builder: ir.IRBuilder,
    kind: Any,
    rows: Any,
    blocks: Any,
    codes: Any,
    scales: Any,
    x: Any,
    steps: Any,
    sums: Any,
    out: Any,
    apart: Any,
) -> None:
    """Products of a tile of rows with the 16 outputs of a panel.

    Args:
        builder: of the code.
        kind: bits of a code, and 1 more if blocks have minima: 8, 4 or 5.
        rows: 1, 2, 4 or `TOGETHER`.
        blocks: of a line.
        codes: address of the panel's codes [blocks, 64 * bits], uint8.
        scales: address of its scales, and minima if any, [blocks, 1 or 2, 16], float16.
        x: address of the rows' numbers [blocks, rows, 32], int8.
        steps: address of what a step of each block of a row is worth [blocks, rows], float32.
        sums: address of the sums of the first and the last 16 numbers of each block of a row
            [blocks, rows, 2], int32.
        out: address of float32 [rows, 16], which are written.
        apart: numbers from one row's to the next's.
    """

    def emit(which: int, count: int) -> None:
        bits, minima = which & -2, which & 1
        parts = range(PANEL // _LANES)
        total = [
            [alloca_once_value(builder, constant(0.0, _LANES)) for _ in parts] for _ in range(count)
        ]
        own = 64 * bits
        low, four = (constant(number, _LANES, INT) for number in (0x0F0F0F0F, 4))
        with for_range(builder, blocks) as loop:
            block = loop.index
            start = builder.mul(block, LONG(own))
            if count == 1:
                for line in range(0, own, 64):
                    prefetch(
                        builder, _bytes(builder, codes, builder.add(start, LONG(_AHEAD + line)))
                    )
            first = builder.mul(block, LONG((1 + minima) * PANEL))
            # One address for all rows: with one for each there are too few registers.
            tile = builder.mul(block, LONG(count))
            places = [builder.add(tile, LONG(row)) for row in range(count)]
            numbers = _bytes(builder, x, builder.mul(tile, LONG(BLOCK)))
            whole = _WholeSums(builder, bits, count * len(parts))

            def sum_of(row: int, places: list[Any] = places) -> Any:
                """The sum of a row's numbers in this block."""
                pair = builder.gep(builder.inttoptr(sums, LONG.as_pointer()), [places[row]])
                pair = builder.bitcast(pair, INT.as_pointer())
                one, two = (builder.load(builder.gep(pair, [LONG(i)])) for i in range(2))
                return builder.add(one, two)

            def add_line(line: Any) -> None:
                """Multiply 64 bytes of codes with numbers of all rows."""
                at = builder.add(start, builder.mul(line, LONG(64)))
                read = [
                    _ints(builder, _bytes(builder, codes, builder.add(at, LONG(4 * _LANES * part))))
                    for part in parts
                ]
                quads = builder.gep(numbers, [builder.mul(line, LONG(4))])
                for group in range(0, _GROUPS, bits):
                    above = [builder.lshr(code, four) for code in read] if group else read
                    taken = [builder.and_(code, low) for code in above] if bits == 4 else read
                    given = [whole.read(code) for code in taken]
                    for row in range(count):
                        quad = builder.gep(quads, [LONG(row * BLOCK + 4 * group)])
                        quad = builder.load(builder.bitcast(quad, INT.as_pointer()), align=1)
                        spread = _spread(builder, quad)
                        for part in parts:
                            whole.add(row * len(parts) + part, given[part], spread)

            # Written out for some rows, more is kept at hand than AVX2 has registers.
            if _VNNI or count == 1:
                for line in range(bits):
                    add_line(LONG(line))
            else:
                with for_range(builder, LONG(bits)) as lines:
                    add_line(lines.index)
            for part in parts:
                scale, least = (
                    _halves(builder, scales, builder.add(first, LONG(i * PANEL + part * _LANES)))
                    if i <= minima
                    else None
                    for i in range(2)
                )
                for row in range(count):
                    found = whole.total(row * len(parts) + part)
                    step = builder.load(builder.gep(floats(builder, steps), [places[row]]))
                    factor = builder.fmul(scale, broadcast(builder, step, _LANES))
                    if not minima and not whole.signed:
                        zeros = builder.mul(sum_of(row), INT(-1 << (bits - 1)))
                        found = builder.add(found, _spread(builder, zeros))
                    found = builder.sitofp(found, factor.type)
                    found = multiply_add(builder, found, factor, builder.load(total[row][part]))
                    if least is not None:
                        sum_ = builder.fmul(step, builder.sitofp(sum_of(row), FLOAT))
                        found = multiply_add(
                            builder, least, broadcast(builder, sum_, _LANES), found
                        )
                    builder.store(found, total[row][part])
        for row in range(count):
            for part in parts:
                place = builder.add(builder.mul(apart, LONG(row)), LONG(part * _LANES))
                store_at(builder, builder.load(total[row][part]), floats(builder, out), place)

    if not SUPPORTED:
        return  # no such instruction, and no call

    def for_kind(which: int) -> None:
        switch(builder, rows, sorted({1, 2, 4, TOGETHER}), lambda count: emit(which, count))

    switch(builder, kind, (4, 5, 8), for_kind)


@llvm_function
def _round_block(builder: ir.IRBuilder, x: Any, numbers: Any, step: Any, sums: Any) -> None:
    """Round a block of 32 numbers to 8 bits by its largest; arguments as for `_quantize`."""
    wide = ir.VectorType(INT, BLOCK)
    read = load_at(builder, floats(builder, x), LONG(0), BLOCK)
    # Of numbers without signs the largest has the largest bits; those of NaN are above all others.
    bits = builder.and_(builder.bitcast(read, wide), constant(0x7FFFFFFF, BLOCK, INT))
    most = builder.bitcast(_reduce(builder, "smax", bits), FLOAT)
    worth = builder.fdiv(most, FLOAT(127.0))
    some = builder.fcmp_ordered(">", most, FLOAT(0.0))
    factor = builder.select(some, builder.fdiv(FLOAT(127.0), most), FLOAT(0.0))
    scaled = call_for_each(builder, "rint", builder.fmul(read, broadcast(builder, factor, BLOCK)))
    whole = builder.fptosi(scaled, wide)
    bytes_ = builder.inttoptr(numbers, ir.VectorType(BYTE, BLOCK).as_pointer())
    builder.store(builder.trunc(whole, bytes_.type.pointee), bytes_, align=1)
    builder.store(worth, floats(builder, step))
    pair = builder.inttoptr(sums, INT.as_pointer())
    for i in range(2):
        half = shuffle(builder, whole, whole, range(i * BLOCK // 2, (i + 1) * BLOCK // 2))
        builder.store(_reduce(builder, "add", half), builder.gep(pair, [LONG(i)]))


def _reduce(builder: ir.IRBuilder, name: str, x: Any) -> Any:
    """One number of all those of a vector of whole ones."""
    kind = ir.FunctionType(INT, [x.type])
    full = f"llvm.vector.reduce.{name}.v{x.type.count}i32"
    return builder.call(builder.module.declare_intrinsic(full, (), kind), [x])


@njit(nogil=True)
def _tile_of(rows: int) -> int:
    """How many of so many rows are multiplied at once."""
    return TOGETHER if rows >= TOGETHER else 4 if rows >= 4 else 2 if rows >= 2 else 1


def _quantize(rows: int, blocks: int, x: int, numbers: int, steps: int, sums: int) -> None:
    """Round rows [rows, 32 * blocks] to 8 bits, each block by its largest number.

    Args:
        rows, blocks: how many there are.
        x: address of float32.
        numbers, steps, sums: addresses of what is written, tile by tile; see `_multiply_panel`.
    """
    row = 0
    while row < rows:
        tile = _tile_of(rows - row)
        for i in range(tile):
            for block in range(blocks):
                at = row * blocks + block * tile + i
                read = x + 4 * BLOCK * ((row + i) * blocks + block)
                _round_block(read, numbers + BLOCK * at, steps + 4 * at, sums + 8 * at)
        row += tile


def _multiply(
    kind: int,
    rows: int,
    blocks: int,
    outputs: int,
    codes: int,
    scales: int,
    x: int,
    steps: int,
    sums: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """The panels `start` to `stop` of all rows; see `_multiply_panel`."""
    found = floats_at(out, (rows, outputs))
    sixteen = np.empty((TOGETHER, PANEL), np.float32)
    own, scaled = 64 * (kind & -2) * blocks, (1 + (kind & 1)) * PANEL * 2 * blocks
    for panel in range(start, stop):
        first, most = panel * PANEL, min(PANEL, outputs - panel * PANEL)
        panel_at = codes + panel * own, scales + panel * scaled
        row = 0
        while row < rows:
            tile, at = _tile_of(rows - row), row * blocks
            given = x + BLOCK * at, steps + 4 * at, sums + 8 * at
            to, apart = out + 4 * (row * outputs + first), outputs
            if most < PANEL:
                to, apart = sixteen.ctypes.data, PANEL
            _multiply_panel(kind, tile, blocks, *panel_at, *given, to, apart)
            if most < PANEL:
                for i in range(tile):
                    for j in range(most):
                        found[row + i, first + j] = sixteen[i, j]
            row += tile
    keep(sixteen)


_compiled_quantize, _compiled_multiply = compile_kernel(_quantize), compile_kernel(_multiply)


@njit(nogil=True)
def multiply_panels(
    kind: int,
    rows: int,
    blocks: int,
    outputs: int,
    codes: int,
    scales: int,
    numbers: int,
    out: int,
    part: int,
    parts: int,
) -> tuple[int, int]:
    """Multiply with one of some parts of a weight; returns which outputs those are.

    `numbers` is the address of rounded rows, which their steps and sums follow. The others are
    those of `_multiply_panel` and `_multiply`.
    """
    panels = (outputs + PANEL - 1) // PANEL
    start, stop = panels * part // parts, panels * (part + 1) // parts
    steps = numbers + rows * blocks * BLOCK
    beside = numbers, steps, steps + 4 * rows * blocks
    sizes = kind, rows, blocks, outputs, codes, scales
    _compiled_multiply(*sizes, *beside, out, start, stop)
    return PANEL * start, min(PANEL * stop, outputs)


@njit(nogil=True)
def rounded_size(rows: int, blocks: int) -> int:
    """Bytes of rounded rows: numbers, steps and sums."""
    return rows * blocks * (BLOCK + 12)


@compile_kernel
def round_rows(rows: int, blocks: int, x: int, to: int) -> None:
    """Round rows as `multiply_panels` takes them; see `_quantize`."""
    steps = to + rows * blocks * BLOCK
    _compiled_quantize(rows, blocks, x, to, steps, steps + 4 * rows * blocks)


def _multiply_parts(address: int) -> None:
    """Products of some panels, part after part; threads share them."""
    n = longs_at(address, (1, 10))[0]
    part = take_part(address)
    while part < n[1]:
        multiply_panels(n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], part, n[1])
        part = take_part(address)


def _multiply_rows(address: int) -> None:
    """Round some rows and multiply them with all panels, part after part; threads share them."""
    n = longs_at(address, (1, 11))[0]
    some, count, blocks, outputs, kind = n[2], n[3], n[4], n[5], n[6]
    rounded = np.empty(rounded_size(some, blocks), np.int8)
    to, row = rounded.ctypes.data, some * take_part(address)
    while row < count:
        rows = min(some, count - row)
        round_rows(rows, blocks, n[7] + 4 * row * blocks * BLOCK, to)
        out = n[8] + 4 * row * outputs
        multiply_panels(kind, rows, blocks, outputs, n[9], n[10], to, out, 0, 1)
        row = some * take_part(address)
    keep(rounded)


_multiply_together, _multiply_many = TeamKernel(_multiply_parts), TeamKernel(_multiply_rows)


def kind_of(codes: Tensor, scales: Tensor) -> int:
    """Return the kind of a weight's codes (`multiply_panels`)."""
    return codes.shape[2] // 64 + scales.shape[2] - 1


def threads_of(rows: int, codes: Tensor) -> int:
    """Return the number of threads for products of some rows with a weight."""
    panels, blocks, own = codes.shape
    return threads_for(panels * blocks * (own + 64 * rows), _WORTH_A_THREAD)


def rows_of_part(rows: int, threads: int) -> int:
    """Return how many rows make a part of work that threads share; 0 where they are too few, and
    threads share the outputs.
    """
    some = min(MOST_TOGETHER, rows // (threads * PARTS) // TOGETHER * TOGETHER)
    return some if some >= LEAST_TOGETHER else 0


def linear_blocks(x: Tensor, codes: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """Product of rows with a weight in blocks, the rows rounded to 8 bits block by block.

    Args:
        x: [..., inputs], float32 or bfloat16, without gradients; inputs a multiple of 32.
        codes: [panels, blocks, 512] or [panels, blocks, 256], uint8.
        scales: [panels, blocks, 1 or 2, 16], float16: what a step is worth, and for codes without
            a zero what the code 0 stands for.
        outputs: of the weight, padded to a multiple of 16 in `codes`.

    Returns:
        [..., outputs], of the type of `x`.
    """
    given, blocks = x.float().contiguous(), codes.shape[1]
    rows = given.numel() // (blocks * BLOCK)
    out = given.new_empty((*x.shape[:-1], outputs))
    kind = kind_of(codes, scales)
    weight = codes.data_ptr(), scales.data_ptr()
    threads = threads_of(rows, codes)
    some = rows_of_part(rows, threads)
    if some:
        memory = given.data_ptr(), out.data_ptr()
        _multiply_many(threads, some, rows, blocks, outputs, kind, *memory, *weight)
    else:
        # In Python, so that numba need not compile a product.
        rounded = torch.empty(rounded_size.py_func(rows, blocks), dtype=torch.int8)
        round_rows(rows, blocks, given.data_ptr(), rounded.data_ptr())
        memory = rounded.data_ptr(), out.data_ptr()
        _multiply_together(threads, kind, rows, blocks, outputs, *weight, *memory)
    return out.to(x.dtype)
