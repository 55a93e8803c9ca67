"""Products on the CPU with weights in blocks of 32 numbers of few bits, as in GGUF files.

Rows are quantized to 8 bits, block by block, and multiplied with the codes as whole numbers. Every
four neighboring products are added up: with AVX-512 VNNI, one instruction does this for 64
products, with AVX2, a few instructions for 32. llama.cpp does the same with these types. Only in
this way does a processor multiply several rows faster than in float32, and one row at the speed of
memory. Sums of whole numbers are exact, so both instruction sets give the same sums. Weights of 16
bits (F16 and BF16) are different: rows are not quantized, and products are float32.

`weir.native.block_formats` describes the memory layout of a weight: *panels* of 16 outputs, so that
the sums of 16 outputs are one or two vectors. Each type has a function, which is compiled when the
first weight of the type is multiplied, and which is called by its address.

Roofline: the larger of the weight's bytes divided by the memory bandwidth, and the time at 128
operations per cycle (AVX2: 64).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once, alloca_once_value, for_range
from torch import Tensor

from weir.kernels.cpu.compilation import (
    compile_callback,
    compile_kernel,
    floats_at,
    keep,
    longs_at,
)
from weir.kernels.cpu.threads import PARTS, TeamKernel, take_part, threads_for
from weir.kernels.cpu.vectors import (
    BYTE,
    FLOAT,
    INT,
    LONG,
    add_product,
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
    vector_at,
    widen,
)
from weir.native.block_formats import BLOCK, BLOCK_TYPES, PANEL, QUADS, SHARED, BlockFormat

LEAST_TOGETHER, MOST_TOGETHER = 32, 64
"""Smallest and largest number of rows that a thread rounds and multiplies with a weight at once:
few rows stay in the cache, and with many the weight is read less often.
"""
_HALF, SHORT = ir.HalfType(), ir.IntType(16)
_WORTH_A_THREAD = 2**16
"""For less work than this, a separate thread costs more than it saves. `threads_of` says how the
work is counted.
"""
_AHEAD = 2**13
"""Distance in bytes at which the product of a single row prefetches into the first cache. Compared
with prefetching into the second cache at 4 KB, this is faster by a tenth if the weight is read from
memory, and by a quarter if it is in the third cache. Codes of 8 bits are not prefetched, because
the processor does so automatically: with explicit prefetching, it reads them 6% slower, or no
faster while other programs use the memory. Codes of fewer bits are read a tenth slower without
prefetching.
"""


_FEATURES = llvmlite.binding.get_host_cpu_features()
_OTHER_PROCESSOR = os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES")
_VNNI = lanes() == PANEL and bool(_FEATURES.get("avx512vnni"))
_NEEDED = ("avx512vnni",) if _VNNI else ("avx2", "fma", "f16c")
SUPPORTED = not _OTHER_PROCESSOR and all(_FEATURES.get(name) for name in _NEEDED)
"""Whether numba compiles for this processor, and it has VNNI on vectors of 64 bytes, or AVX2 with
FMA and F16C.
"""
_LANES = PANEL if _VNNI else PANEL // 2
"""Whole-number sums in a vector."""
TOGETHER = 8 if _VNNI else 4
"""Largest number of rows that are multiplied at once; the sums of a panel for so many rows fit into
registers.
"""
_CHAINS = 2 if _VNNI else 1
"""Number of partial sums of each output for numbers of 16 bits, because a single sum would wait for
each addition. Their number does not depend on the number of rows, so that a row has the same answer
alone and among others.
"""
_INTS, _SHORTS, _BYTES = (ir.VectorType(ir.IntType(32 // n), n * _LANES) for n in (1, 2, 4))


def _bytes(builder: ir.IRBuilder, address: Any, place: Any) -> Any:
    return builder.gep(builder.inttoptr(address, BYTE.as_pointer()), [place])


def _ints(builder: ir.IRBuilder, pointer: Any) -> Any:
    """Load a vector of numbers of 32 bits from a pointer."""
    return builder.load(builder.bitcast(pointer, _INTS.as_pointer()), align=1)


def _spread(builder: ir.IRBuilder, number: Any) -> Any:
    """Make a vector with copies of one number of 32 bits."""
    alone = builder.insert_element(ir.Constant(_INTS, ir.Undefined), number, INT(0))
    return builder.shuffle_vector(alone, alone, ir.Constant(_INTS, [0] * _LANES))


def _halves(builder: ir.IRBuilder, address: Any, place: Any) -> Any:
    """Load float16 numbers as float32, `place` numbers after an address."""
    start = builder.gep(builder.inttoptr(address, _HALF.as_pointer()), [place])
    vector = builder.bitcast(start, ir.VectorType(_HALF, _LANES).as_pointer())
    return builder.fpext(builder.load(vector, align=2), ir.VectorType(FLOAT, _LANES))


def _instruction(builder: ir.IRBuilder, name: str, result: Any, *given: Any) -> Any:
    """Emit an x86 instruction on vectors, by the name of its LLVM intrinsic."""
    kind = ir.FunctionType(result, [value.type for value in given])
    return builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), given)


class _WholeSums:
    """Sums of products, in whole numbers: the values of a weight's codes times the numbers of some
    rows. A sum is over the numbers that share a scale or factor (`BlockFormat.per`).

    A value is unsigned, and a row's number is signed. VNNI adds products of these in fours, in 32
    bits. AVX2 adds pairs of products in 16 bits. If values are small enough, sums stay in 16 bits
    until all products are added. If values are so large that even two products would not fit, 128
    is subtracted from each value, and the sign of the difference is moved to the row's number.

    Args:
        builder: builds the code.
        form: the format of the weight.
        sums: the sum of each row's numbers. If a value other than 0 stands for 0, this sum times
            that value is subtracted.
        parts: number of vectors for the sums of a panel.
    """

    def __init__(
        self, builder: ir.IRBuilder, form: BlockFormat, sums: Sequence[Any], parts: int
    ) -> None:
        self._builder, self._parts, most = builder, parts, 127 * max(form.values)
        self._signed = not _VNNI and 2 * most >= 2**15
        self._in_16_bits = not _VNNI and form.per // 2 * most < 2**15
        self._zero = 0 if self._signed else form.zero
        self._sums = sums
        nothing = ir.Constant(_SHORTS if self._in_16_bits else _INTS, None)
        self._totals = []
        for total in sums:
            first = nothing
            if self._zero and not self._in_16_bits:
                first = _spread(builder, builder.mul(total, INT(-self._zero)))
            self._totals += [alloca_once(builder, first.type) for _ in range(parts)]
            for place in self._totals[-parts:]:
                builder.store(first, place)

    def read(self, values: Any) -> list[Any]:
        """Convert a vector of values to the form that `add` needs."""
        if not self._signed:
            return [values]
        builder = self._builder
        signed = builder.bitcast(builder.xor(values, constant(-0x7F7F7F80, _LANES, INT)), _BYTES)
        negative = builder.icmp_signed("<", signed, ir.Constant(_BYTES, None))
        size = builder.select(negative, builder.sub(ir.Constant(_BYTES, None), signed), signed)
        return [size, signed]

    def add(self, row: int, part: int, values: list[Any], numbers: Any) -> None:
        """Add the products of values with four numbers of a row, the same four for each output.

        Args:
            row, part: which sums.
            values: from `read`: four values for each output.
            numbers: the four numbers, as often as a vector has outputs.
        """
        builder, place = self._builder, self._totals[row * self._parts + part]
        total = builder.load(place)
        if _VNNI:
            found = _instruction(builder, "avx512.vpdpbusd.512", _INTS, total, values[0], numbers)
            builder.store(found, place)
            return
        numbers = builder.bitcast(numbers, _BYTES)
        if self._signed:
            numbers = _instruction(builder, "avx2.psign.b", _BYTES, numbers, values[1])
        own = builder.bitcast(values[0], _BYTES)
        pairs = _instruction(builder, "avx2.pmadd.ub.sw", _SHORTS, own, numbers)
        more = pairs if self._in_16_bits else self._by_fours(pairs)
        builder.store(builder.add(total, more), place)

    def total(self, row: int, part: int) -> Any:
        """Return the sums of a row for one vector of outputs, in float32."""
        builder = self._builder
        total = builder.load(self._totals[row * self._parts + part])
        if self._in_16_bits:
            total = self._by_fours(total)
            if self._zero:
                zeros = builder.mul(self._sums[row], INT(-self._zero))
                total = builder.add(total, _spread(builder, zeros))
        return builder.sitofp(total, ir.VectorType(FLOAT, _LANES))

    def _by_fours(self, pairs: Any) -> Any:
        ones = ir.Constant(_SHORTS, [1] * (2 * _LANES))
        return _instruction(self._builder, "avx2.pmadd.wd", _INTS, pairs, ones)


class _Codes:
    """Reads the values of a panel's codes, one vector of quads at a time.

    Args:
        builder: builds the code.
        form: the format of the weight.
        start: pointer to the codes of a block.
    """

    def __init__(self, builder: ir.IRBuilder, form: BlockFormat, start: Any) -> None:
        self._builder, self._form, self._start = builder, form, start

    def values(self, group: int, part: int, line: Any = None) -> Any:
        """Return the values of a group, for one vector of outputs.

        If `line` is given, return the values of the group `group + line` instead. `line` can be
        computed at run time, and the codes of this group must be `line` vectors further on.
        """
        builder, found, below, before = self._builder, None, 0, 0
        for plane, bits in enumerate(self._form.planes):
            vector, up = self._form.place_of(plane, group)
            at = LONG(64 * (before + vector) + 4 * _LANES * part)
            if line is not None:
                at = builder.add(at, builder.mul(line, LONG(64)))
            read = _ints(builder, builder.gep(self._start, [at]))
            if bits < 8:
                shift, mask = up - below, ((1 << bits) - 1) << below
                if shift:
                    move = builder.lshr if shift > 0 else builder.shl
                    read = move(read, constant(abs(shift), _LANES, INT))
                read = builder.and_(read, constant(mask * 0x01010101, _LANES, INT))
            found = read if found is None else builder.or_(found, read)
            below, before = below + bits, before + bits
        return self._look_up(found) if self._form.table else found

    def _look_up(self, codes: Any) -> Any:
        entries = [*self._form.table, *[0] * (16 - len(self._form.table))]
        table = ir.Constant(_BYTES, entries * (_LANES // 4))
        name = "avx512.pshuf.b.512" if _VNNI else "avx2.pshuf.b"
        found = _instruction(
            self._builder, name, _BYTES, table, self._builder.bitcast(codes, _BYTES)
        )
        return self._builder.bitcast(found, _INTS)


def _emit_panel(
    form: BlockFormat,
    builder: ir.IRBuilder,
    rows: Any,
    blocks: Any,
    codes: Any,
    scales: Any,
    x: Any,
    steps: Any,
    sums: Any,
    out: Any,
    apart: Any,
    next_: Any,
) -> None:
    """Emit the products of a tile of rows with the 16 outputs of a panel.

    Args:
        form: the format of the weight.
        builder: builds the code.
        rows: 1, 2, 4 or `TOGETHER`.
        blocks: number of blocks in a row.
        codes: address of the panel's codes [blocks, 64 * bits], uint8.
        scales: address of the panel's units of scales (`native.block_formats`).
        x: address of the rows' numbers [blocks, rows, 32], int8.
        steps: address of the size of a quantization step in each block of a row [blocks, rows],
            float32.
        sums: address of the sums of the first and the last 16 numbers of each block of a row
            [blocks, rows, 2], int32.
        out: address of the output, float32 [rows, 16].
        apart: distance between the outputs of two rows, in numbers.
        next_: address of the memory that is read next. With `TOGETHER` rows, one cache line of it
            is prefetched into the second cache for each block.
    """
    parts = range(PANEL // _LANES)
    scopes = range(BLOCK // form.per)
    wide = ir.VectorType(FLOAT, _LANES)

    def scale_at(unit: Any, head: int, part: int) -> Any:
        """Load a unit's scale or minimum for some outputs."""
        found = _halves(builder, unit, LONG(head * PANEL + part * _LANES))
        if not head and form.unit != 1.0:
            found = builder.fmul(found, constant(form.unit, _LANES))
        return found

    def factor_at(start: Any, head: int, scope: int, part: int) -> Any:
        """Load a block's factor of a scale or minimum for some outputs."""
        at = LONG((scope * form.heads + head) * PANEL + part * _LANES)
        at = builder.bitcast(builder.gep(start, [at]), ir.VectorType(BYTE, _LANES).as_pointer())
        read = builder.load(at, align=1)
        extend = builder.zext if head else builder.sext
        return builder.sitofp(extend(read, ir.VectorType(INT, _LANES)), wide)

    def emit(count: int) -> None:
        total = [
            [alloca_once_value(builder, constant(0.0, _LANES)) for _ in parts] for _ in range(count)
        ]
        with for_range(builder, blocks) as loop:
            block = loop.index
            start = builder.mul(block, LONG(form.code_bytes))
            if count == 1 and form.bits < 8:
                for line in range(0, form.code_bytes, 64):
                    ahead = builder.add(start, LONG(_AHEAD + line))
                    prefetch(builder, _bytes(builder, codes, ahead), level=1)
            if count == TOGETHER:
                prefetch(builder, _bytes(builder, next_, builder.mul(block, LONG(64))))
            unit = block
            if form.shared:
                unit = builder.lshr(block, LONG(SHARED.bit_length() - 1))
            unit = builder.add(scales, builder.mul(unit, LONG(form.scale_bytes)))
            factors = None
            if form.shared:
                within = builder.and_(block, LONG(SHARED - 1))
                at = builder.mul(within, LONG(form.factors * PANEL))
                factors = _bytes(builder, unit, builder.add(at, LONG(2 * form.heads * PANEL)))
            read = _Codes(builder, form, _bytes(builder, codes, start))
            # Use one address for all rows, because with one for each there would be too few
            # registers.
            tile = builder.mul(block, LONG(count))
            numbers = _bytes(builder, x, builder.mul(tile, LONG(BLOCK)))
            places = [builder.add(tile, LONG(row)) for row in range(count)]
            step = [builder.load(builder.gep(floats(builder, steps), [place])) for place in places]
            pairs = builder.inttoptr(sums, LONG.as_pointer())
            pairs = [
                builder.bitcast(builder.gep(pairs, [place]), INT.as_pointer()) for place in places
            ]
            summed = [
                [builder.load(builder.gep(pair, [LONG(i)])) for i in range(2)] for pair in pairs
            ]
            if len(scopes) == 1:
                summed = [[builder.add(*pair)] for pair in summed]
            value: list[list[Any]] = [[None for _ in parts] for _ in range(count)]
            least: list[list[Any]] = [[None for _ in parts] for _ in range(count)]
            for scope in scopes:
                mine = [row[scope] for row in summed]
                whole = _WholeSums(builder, form, mine, len(parts))

                def add_group(group: int, line: Any = None, whole: _WholeSums = whole) -> None:
                    """Multiply the values of a group with the numbers of all rows."""
                    given = [whole.read(read.values(group, part, line)) for part in parts]
                    for row in range(count):
                        at = LONG(row * BLOCK + 4 * group)
                        if line is not None:
                            at = builder.add(at, builder.mul(line, LONG(4)))
                        quad = builder.bitcast(builder.gep(numbers, [at]), INT.as_pointer())
                        spread = _spread(builder, builder.load(quad, align=1))
                        for part in parts:
                            whole.add(row, part, given[part], spread)

                # Use a loop for several rows with AVX2, because the unrolled code would need too
                # many registers.
                if _VNNI or count == 1 or len(form.planes) > 1 or form.halves:
                    for group in range(scope * form.per // 4, (scope + 1) * form.per // 4):
                        add_group(group)
                else:
                    with for_range(builder, LONG(form.bits)) as lines:
                        for group in range(0, QUADS, form.bits):
                            add_group(group, lines.index)
                for part in parts:
                    scale = scale_at(unit, 0, part)
                    if form.shared:
                        scale = builder.fmul(scale, factor_at(factors, 0, scope, part))
                    lowest = None
                    if form.minima:
                        lowest = scale_at(unit, 1, part)
                        if form.shared:
                            own = factor_at(factors, 1, scope, part)
                            lowest = builder.fneg(builder.fmul(lowest, own))
                    for row in range(count):
                        found = whole.total(row, part)
                        before = value[row][part]
                        value[row][part] = (
                            builder.fmul(found, scale)
                            if before is None
                            else multiply_add(builder, found, scale, before)
                        )
                        if lowest is not None:
                            sum_ = broadcast(builder, builder.sitofp(mine[row], FLOAT), _LANES)
                            before = least[row][part]
                            least[row][part] = (
                                builder.fmul(lowest, sum_)
                                if before is None
                                else multiply_add(builder, lowest, sum_, before)
                            )
            for row in range(count):
                worth = broadcast(builder, step[row], _LANES)
                for part in parts:
                    found = value[row][part]
                    if form.minima:
                        found = builder.fadd(found, least[row][part])
                    place = total[row][part]
                    builder.store(multiply_add(builder, found, worth, builder.load(place)), place)
        for row in range(count):
            for part in parts:
                place = builder.add(builder.mul(apart, LONG(row)), LONG(part * _LANES))
                store_at(builder, builder.load(total[row][part]), floats(builder, out), place)

    switch(builder, rows, sorted({1, 2, 4, TOGETHER}), emit)


def _emit_numbers(
    form: BlockFormat,
    builder: ir.IRBuilder,
    rows: Any,
    blocks: Any,
    codes: Any,
    x: Any,
    out: Any,
    apart: Any,
) -> None:
    """Emit the products of a tile of rows with 16 outputs whose weights are numbers of 16 bits.

    Arguments are those of `_emit_panel`, except that `x` is the address of float32 [rows, 32 *
    blocks].
    """
    parts = range(PANEL // _LANES)

    def number_at(place: Any) -> Any:
        if form.number == "half":
            return _halves(builder, codes, place)
        start = builder.inttoptr(codes, SHORT.as_pointer())
        return widen(builder, builder.load(vector_at(builder, start, place, _LANES), align=2))

    def emit(count: int) -> None:
        total = [
            [alloca_once_value(builder, constant(0.0, _LANES)) for _ in range(count * len(parts))]
            for _ in range(_CHAINS)
        ]
        far = builder.mul(blocks, LONG(BLOCK))
        with for_range(builder, blocks) as loop:
            first = builder.mul(loop.index, LONG(BLOCK))
            if count == 1:
                start = builder.mul(loop.index, LONG(form.code_bytes))
                for line in range(0, form.code_bytes, 64):
                    ahead = builder.add(start, LONG(_AHEAD + line))
                    prefetch(builder, _bytes(builder, codes, ahead), level=1)
            lines = [
                builder.gep(floats(builder, x), [builder.add(first, builder.mul(far, LONG(row)))])
                for row in range(count)
            ]
            for i in range(BLOCK):
                at = builder.mul(builder.add(first, LONG(i)), LONG(PANEL))
                weights = [number_at(builder.add(at, LONG(part * _LANES))) for part in parts]
                for row, line in enumerate(lines):
                    factor = builder.load(builder.gep(line, [LONG(i)]))
                    factor = broadcast(builder, factor, _LANES)
                    for part in parts:
                        sums = total[i % _CHAINS][row * len(parts) + part]
                        add_product(builder, sums, weights[part], factor)
        for row in range(count):
            for part in parts:
                found, *others = (builder.load(sums[row * len(parts) + part]) for sums in total)
                for other in others:
                    found = builder.fadd(found, other)
                place = builder.add(builder.mul(apart, LONG(row)), LONG(part * _LANES))
                store_at(builder, found, floats(builder, out), place)

    switch(builder, rows, sorted({1, 2, 4, TOGETHER}), emit)


@lru_cache
def block_function(kind: str) -> int:
    """Compile products with weights of a type, and return the address of their function for
    `multiply_panels`. The address is negated if rows are not rounded before they are multiplied.
    """
    form = BLOCK_TYPES[kind]

    # Each argument has a name, because numba does not pass on starred arguments.
    def emit(
        builder: ir.IRBuilder,
        rows: Any,
        blocks: Any,
        codes: Any,
        scales: Any,
        x: Any,
        steps: Any,
        sums: Any,
        out: Any,
        apart: Any,
        next_: Any,
    ) -> None:
        if form.number:
            _emit_numbers(form, builder, rows, blocks, codes, x, out, apart)
        else:
            given = x, steps, sums, out, apart, next_
            _emit_panel(form, builder, rows, blocks, codes, scales, *given)

    panel = llvm_function(emit)

    def multiply_panel(  # the arguments of `_emit_panel`
        rows: int,
        blocks: int,
        codes: int,
        scales: int,
        x: int,
        steps: int,
        sums: int,
        out: int,
        apart: int,
        next_: int,
    ) -> None:
        panel(rows, blocks, codes, scales, x, steps, sums, out, apart, next_)

    address: int = compile_callback(multiply_panel, arguments=10, name=kind).address
    return -address if form.number else address


@llvm_function
def _multiply_panel(
    builder: ir.IRBuilder,
    function: Any,
    rows: Any,
    blocks: Any,
    codes: Any,
    scales: Any,
    x: Any,
    steps: Any,
    sums: Any,
    out: Any,
    apart: Any,
    next_: Any,
) -> None:
    """Call a function of `block_function`; arguments are those of `_emit_panel`."""
    given = rows, blocks, codes, scales, x, steps, sums, out, apart, next_
    kind = ir.FunctionType(ir.VoidType(), [LONG] * len(given))
    builder.call(builder.inttoptr(function, kind.as_pointer()), given)


@llvm_function
def _round_block(builder: ir.IRBuilder, x: Any, numbers: Any, step: Any, sums: Any) -> None:
    """Round a block of 32 numbers to 8 bits, scaled by the largest; arguments are those of
    `_quantize`.
    """
    wide = ir.VectorType(INT, BLOCK)
    read = load_at(builder, floats(builder, x), LONG(0), BLOCK)
    # Without signs, the largest number has the largest bits; the bits of NaN are larger than all
    # others.
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
    """Reduce a vector of whole numbers to one number."""
    kind = ir.FunctionType(INT, [x.type])
    full = f"llvm.vector.reduce.{name}.v{x.type.count}i32"
    return builder.call(builder.module.declare_intrinsic(full, (), kind), [x])


@njit(nogil=True)
def _tile_of(rows: int) -> int:
    """Return how many of `rows` rows are multiplied at once."""
    return TOGETHER if rows >= TOGETHER else 4 if rows >= 4 else 2 if rows >= 2 else 1


def _quantize(rows: int, blocks: int, x: int, numbers: int, steps: int, sums: int) -> None:
    """Round rows [rows, 32 * blocks] to 8 bits, each block scaled by its largest number.

    Args:
        rows, blocks: number of rows, and of blocks in a row.
        x: address of float32.
        numbers, steps, sums: addresses of the outputs, tile by tile; see `_emit_panel`.
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
    function: int,
    rows: int,
    blocks: int,
    outputs: int,
    codes: int,
    code_bytes: int,
    scales: int,
    scale_bytes: int,
    x: int,
    steps: int,
    sums: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """Multiply all rows with the panels `start` to `stop`; see `multiply_panels`."""
    found = floats_at(out, (rows, outputs))
    sixteen = np.empty((TOGETHER, PANEL), np.float32)
    for panel in range(start, stop):
        first, most = panel * PANEL, min(PANEL, outputs - panel * PANEL)
        panel_at = codes + panel * code_bytes, scales + panel * scale_bytes
        row = 0
        while row < rows:
            tile, at = _tile_of(rows - row), row * blocks
            given = x + BLOCK * at, steps + 4 * at, sums + 8 * at
            if function < 0:
                given = x + 4 * BLOCK * at, steps, sums
            to, apart = out + 4 * (row * outputs + first), outputs
            if most < PANEL:
                to, apart = sixteen.ctypes.data, PANEL
            # Each tile prefetches other cache lines of the next panel, one for each block.
            next_ = panel_at[0] + code_bytes + 64 * blocks * (row // TOGETHER)
            _multiply_panel(abs(function), tile, blocks, *panel_at, *given, to, apart, next_)
            if most < PANEL:
                for i in range(tile):
                    for j in range(most):
                        found[row + i, first + j] = sixteen[i, j]
            row += tile
    keep(sixteen)


_compiled_quantize, _compiled_multiply = compile_kernel(_quantize), compile_kernel(_multiply)


@njit(nogil=True)
def multiply_panels(
    function: int,
    rows: int,
    blocks: int,
    outputs: int,
    codes: int,
    code_bytes: int,
    scales: int,
    scale_bytes: int,
    numbers: int,
    out: int,
    part: int,
    parts: int,
) -> tuple[int, int]:
    """Multiply with one of `parts` parts of a weight; returns the range of this part's outputs.

    Args:
        function: the function for the weight's type, from `block_function`.
        rows, blocks, outputs: sizes.
        codes, scales: addresses of the weight's codes and scales.
        code_bytes, scale_bytes: bytes of the codes and scales of a panel.
        numbers: address of rounded rows from `round_rows`; of float32 rows if `function` is less
            than 0.
        out: address of the output, float32 [rows, outputs].
        part, parts: the number of the part, and the number of parts.
    """
    panels = (outputs + PANEL - 1) // PANEL
    start, stop = panels * part // parts, panels * (part + 1) // parts
    steps = numbers + rows * blocks * BLOCK
    beside = numbers, steps, steps + 4 * rows * blocks
    weight = codes, code_bytes, scales, scale_bytes
    _compiled_multiply(function, rows, blocks, outputs, *weight, *beside, out, start, stop)
    return PANEL * start, min(PANEL * stop, outputs)


@njit(nogil=True)
def rounded_size(rows: int, blocks: int) -> int:
    """Return the bytes of rounded rows: numbers, steps and sums."""
    return rows * blocks * (BLOCK + 12)


@compile_kernel
def round_rows(rows: int, blocks: int, x: int, to: int) -> None:
    """Round rows for `multiply_panels`; see `_quantize`."""
    steps = to + rows * blocks * BLOCK
    _compiled_quantize(rows, blocks, x, to, steps, steps + 4 * rows * blocks)


def _multiply_parts(address: int) -> None:
    """Multiply part after part; threads share the parts, and each thread rounds all rows."""
    n = longs_at(address, (1, 12))[0]
    function, rows, blocks, outputs, numbers = n[2], n[3], n[4], n[5], n[10]
    rounded = np.empty(rounded_size(rows, blocks), np.int8)
    part = take_part(address)
    if function > 0 and part < n[1]:
        round_rows(rows, blocks, n[10], rounded.ctypes.data)
        numbers = rounded.ctypes.data
    while part < n[1]:
        sizes = function, rows, blocks, outputs
        multiply_panels(*sizes, n[6], n[7], n[8], n[9], numbers, n[11], part, n[1])
        part = take_part(address)
    keep(rounded)


def _multiply_rows(address: int) -> None:
    """Round some rows and multiply them with all panels, part after part; threads share the
    parts.
    """
    n = longs_at(address, (1, 13))[0]
    some, count, blocks, outputs, function = n[2], n[3], n[4], n[5], n[6]
    rounded = np.empty(rounded_size(some, blocks), np.int8)
    to, row = rounded.ctypes.data, some * take_part(address)
    while row < count:
        rows = min(some, count - row)
        x, out = n[7] + 4 * row * blocks * BLOCK, n[8] + 4 * row * outputs
        if function > 0:
            round_rows(rows, blocks, x, to)
            x = to
        sizes = function, rows, blocks, outputs
        multiply_panels(*sizes, n[9], n[10], n[11], n[12], x, out, 0, 1)
        row = some * take_part(address)
    keep(rounded)


_multiply_together, _multiply_many = TeamKernel(_multiply_parts), TeamKernel(_multiply_rows)


def memory_of(codes: Tensor, scales: Tensor) -> tuple[int, int, int, int]:
    """Return the addresses of a weight's codes and scales, each with the bytes of a panel."""
    panels = codes.shape[0]
    return codes.data_ptr(), codes.nbytes // panels, scales.data_ptr(), scales.nbytes // panels


def threads_of(rows: int, codes: Tensor) -> int:
    """Return the number of threads for products of some rows with a weight. The work is counted as
    the bytes of the codes, plus one for every eight products of numbers.
    """
    panels, blocks, own = codes.shape
    return threads_for(panels * blocks * (own + 64 * rows), _WORTH_A_THREAD)


def rows_of_part(rows: int, threads: int) -> int:
    """Return how many rows make up one part of the work that threads share; 0 if there are too few
    rows, so that threads share the outputs.
    """
    some = min(MOST_TOGETHER, rows // (threads * PARTS) // TOGETHER * TOGETHER)
    return some if some >= LEAST_TOGETHER else 0


def linear_blocks(x: Tensor, codes: Tensor, scales: Tensor, outputs: int, kind: str) -> Tensor:
    """Multiply rows with a weight in blocks, after rounding the rows to 8 bits block by block. For
    weights of 16 bits, rows are not rounded.

    Args:
        x: [..., inputs], float32 or bfloat16, without gradients; inputs a multiple of 32.
        codes, scales: of the weight (`native.block_formats`).
        outputs: number of outputs of the weight; `codes` has more if it is not a multiple of 16.
        kind: the type of the blocks.

    Returns:
        [..., outputs], of the type of `x`.
    """
    # Every call of PyTorch takes noticeable time, because a step has evicted PyTorch's code from
    # the caches.
    given = x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()
    blocks = codes.shape[1]
    rows = given.numel() // (blocks * BLOCK)
    out = given.new_empty((*x.shape[:-1], outputs))
    function, weight = block_function(kind), memory_of(codes, scales)
    threads = threads_of(rows, codes)
    some = rows_of_part(rows, threads)
    if some:
        memory = given.data_ptr(), out.data_ptr()
        _multiply_many(threads, some, rows, blocks, outputs, function, *memory, *weight)
    else:
        memory = given.data_ptr(), out.data_ptr()
        _multiply_together(threads, function, rows, blocks, outputs, *weight, *memory)
    return out if x.dtype == out.dtype else out.to(x.dtype)
