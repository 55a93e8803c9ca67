"""Puts blocks of a GGUF file into panels on the CPU, for the most common types.

A file stores one line (output) after the other; `weir.native.block_formats` describes panels. For
each of 16 lines, one unit is split into codes of one byte each. These codes stay in the processor's
first cache, and are then cut into planes. `weir.native.block_types` is the readable reference.

Roofline: the file's bytes, which are read, and about as many written, divided by the memory
bandwidth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core.cgutils import for_range
from torch import Tensor

from weir.kernels.cpu.compilation import WHOLE, compile_kernel, keep, shorts_at, ubytes_at
from weir.kernels.cpu.threads import run_in_threads
from weir.kernels.cpu.vectors import (
    BYTE,
    INT,
    LONG,
    constant,
    llvm_function,
    shuffle,
    switch,
    transpose,
)
from weir.native.block_formats import BLOCK, BLOCK_TYPES, PANEL, QUADS, SHARED, BlockFormat

_BYTES = ("Q8_0", 34), ("Q4_0", 18), ("Q4_1", 20), ("Q5_0", 22), ("Q5_1", 24), ("IQ4_NL", 18)
_SHARED = ("Q2_K", 84), ("Q3_K", 110), ("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210), ("IQ4_XS", 136)
_SIZES = dict((*_BYTES, *_SHARED))
"""Bytes of a unit in a file, by type."""
KINDS = tuple(_SIZES)
"""Types that this kernel supports."""
Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS = range(len(_SIZES))
_WORTH_A_THREAD = 2**20
"""For fewer bytes than this, a separate thread costs more than it saves."""


def _read(builder: ir.IRBuilder, address: Any, count: int) -> Any:
    """Load a vector of bytes from an address."""
    kind = ir.VectorType(BYTE, count).as_pointer()
    return builder.load(builder.inttoptr(address, kind), align=1)


def _write(builder: ir.IRBuilder, vector: Any, address: Any) -> None:
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()), align=1)


# These functions use vectors explicitly. LLVM would compile loops to code that handles single
# bytes, because it cannot know that the codes do not overlap the bytes that are read. For types
# with small units, such loops take four times as long as everything else.


@llvm_function
def _nibbles(builder: ir.IRBuilder, data: Any, count: Any, codes: Any) -> None:
    """Split `count` bytes into codes: first the low halves of all bytes, then the high halves.

    Args:
        builder: builds the code.
        data, codes: addresses.
        count: a multiple of 16.
    """
    with for_range(builder, builder.lshr(count, LONG(4))) as loop:
        at = builder.shl(loop.index, LONG(4))
        read, to = _read(builder, builder.add(data, at), 16), builder.add(codes, at)
        _write(builder, builder.and_(read, constant(15, 16, BYTE)), to)
        high = builder.lshr(read, constant(4, 16, BYTE))
        _write(builder, high, builder.add(to, count))


@llvm_function
def _bytes(builder: ir.IRBuilder, data: Any, codes: Any) -> None:
    """Convert 32 signed bytes to codes of 8 bits, which have no sign."""
    signed = _read(builder, data, BLOCK)
    _write(builder, builder.xor(signed, constant(128, BLOCK, BYTE)), codes)


@llvm_function
def _add_pairs(builder: ir.IRBuilder, data: Any, codes: Any, up: Any) -> None:
    """Add pairs of bits of 32 bytes to 128 codes, the lowest of all bytes first.

    Args:
        builder: builds the code.
        data, codes: addresses.
        up: the position of the lower bit in a code.
    """
    read, move = _read(builder, data, BLOCK), _spread(builder, up)
    for part in range(4):
        found = builder.lshr(read, constant(2 * part, BLOCK, BYTE))
        found = builder.shl(builder.and_(found, constant(3, BLOCK, BYTE)), move)
        _add(builder, found, builder.add(codes, LONG(BLOCK * part)))


@llvm_function
def _add_bits(builder: ir.IRBuilder, data: Any, codes: Any, up: Any) -> None:
    """Add single bits of 32 bytes to 256 codes, the lowest of all bytes first.

    Args:
        builder: builds the code.
        data, codes: addresses.
        up: the position of the bit in a code.
    """
    read = _read(builder, data, BLOCK)
    worth = _spread(builder, builder.shl(LONG(1), up))
    for part in range(8):
        bit = builder.and_(read, constant(1 << part, BLOCK, BYTE))
        _add(builder, _where(builder, bit, worth), builder.add(codes, LONG(BLOCK * part)))


@llvm_function
def _add_fifth(builder: ir.IRBuilder, data: Any, codes: Any) -> None:
    """Add a fifth bit to 32 codes, from 32 consecutive bits."""
    read = _read(builder, data, 4)
    each = shuffle(builder, read, read, [i // 8 for i in range(BLOCK)])
    kind = ir.VectorType(BYTE, BLOCK)
    bit = builder.and_(each, ir.Constant(kind, [1 << i % 8 for i in range(BLOCK)]))
    _add(builder, _where(builder, bit, constant(16, BLOCK, BYTE)), codes)


def _spread(builder: ir.IRBuilder, number: Any) -> Any:
    """Make a vector of 32 bytes, each of them the lowest byte of a number of 64 bits."""
    vector = ir.VectorType(BYTE, BLOCK)
    alone = builder.insert_element(
        ir.Constant(vector, ir.Undefined), builder.trunc(number, BYTE), INT(0)
    )
    return builder.shuffle_vector(alone, alone, ir.Constant(ir.VectorType(INT, BLOCK), None))


def _where(builder: ir.IRBuilder, bits: Any, worth: Any) -> Any:
    """Return `worth` in every byte whose `bits` are not 0, and 0 in the others."""
    nothing = ir.Constant(bits.type, None)
    return builder.select(builder.icmp_unsigned("!=", bits, nothing), worth, nothing)


def _add(builder: ir.IRBuilder, found: Any, codes: Any) -> None:
    """Add bits to 32 codes at an address."""
    _write(builder, builder.or_(_read(builder, codes, BLOCK), found), codes)


@njit(nogil=True)
def _six_bits(raw: int, at: int, factors: np.ndarray) -> None:
    """Read the factors of scales and minima of Q4_K and Q5_K, which have 6 bits each."""
    data = ubytes_at(raw + at, (3, 4))
    for i in range(4):
        low, least, high = data[0, i], data[1, i], data[2, i]
        factors[2 * i], factors[2 * i + 1] = low & 63, least & 63
        factors[8 + 2 * i] = (high & 15) | ((low >> 2) & 48)
        factors[9 + 2 * i] = (high >> 4) | ((least >> 2) & 48)


@njit(nogil=True)
def _take_apart(kind: int, raw: int, heads: np.ndarray, factors: np.ndarray, codes: int) -> None:
    """Split a unit of a file at the address `raw`: write its scales and minima to `heads`, its
    factors to `factors`, and its codes to the address `codes`.
    """
    data = ubytes_at(raw, WHOLE)[0]
    at = 0
    if kind == Q2_K:
        at = 80
    elif kind == Q3_K:
        at = 108
    elif kind == Q6_K:
        at = 208
    for i in range(len(heads)):
        heads[i] = shorts_at(raw + at, WHOLE)[0, i]
    if kind == Q8_0:
        _bytes(raw + 2, codes)
    elif kind in (Q4_0, IQ4_NL):
        _nibbles(raw + 2, BLOCK // 2, codes)
    elif kind == Q4_1:
        _nibbles(raw + 4, BLOCK // 2, codes)
    elif kind in (Q5_0, Q5_1):
        first = 2 if kind == Q5_0 else 4
        _nibbles(raw + first + 4, BLOCK // 2, codes)
        _add_fifth(raw + first, codes)
    elif kind in (Q4_K, Q5_K):
        _six_bits(raw, 4, factors)
        first = 16 if kind == Q4_K else 48
        for i in range(4):
            _nibbles(raw + first + BLOCK * i, BLOCK, codes + 2 * BLOCK * i)
        if kind == Q5_K:
            _add_bits(raw + 16, codes, 4)
    elif kind == Q6_K:
        for i in range(2):
            _nibbles(raw + 64 * i, 64, codes + 128 * i)
            _add_pairs(raw + 128 + 32 * i, codes + 128 * i, 4)
        for i in range(16):
            factors[i] = data[192 + i]
    elif kind == Q3_K:
        ubytes_at(codes, (1, BLOCK * SHARED))[:] = 0
        for i in range(2):
            _add_pairs(raw + 32 + 32 * i, codes + 128 * i, 0)
        _add_bits(raw, codes, 2)
        for i in range(16):
            low = (data[96 + i % 8] >> (4 * (i // 8))) & 15
            factors[i] = (low | (((data[104 + i % 4] >> (2 * (i // 4))) & 3) << 4)) - 32
    elif kind == Q2_K:
        ubytes_at(codes, (1, BLOCK * SHARED))[:] = 0
        for i in range(2):
            _add_pairs(raw + 16 + 32 * i, codes + 128 * i, 0)
        for i in range(16):
            factors[2 * i], factors[2 * i + 1] = data[i] & 15, data[i] >> 4
    else:
        for i in range(SHARED):
            low = (data[4 + i // 2] >> (4 * (i % 2))) & 15
            factors[i] = (low | (((data[2 + i // 4] >> (2 * (i % 4))) & 3) << 4)) - 32
            _nibbles(raw + 8 + 16 * i, 16, codes + BLOCK * i)


_LAYOUTS = sorted({(BLOCK_TYPES[kind].planes, BLOCK_TYPES[kind].halves) for kind in _SIZES})


@llvm_function
def _cut(builder: ir.IRBuilder, layout: Any, apart: Any, step: Any, out: Any) -> None:
    """Write the planes of a block from the codes of 16 outputs.

    Args:
        builder: builds the code.
        layout: the index in `_LAYOUTS` of the type's planes and halves.
        apart: address of the 32 codes of the first output, uint8.
        step: bytes between the codes of two outputs.
        out: address of the block's codes.
    """
    wide, narrow = ir.VectorType(INT, PANEL), ir.VectorType(INT, QUADS)

    def emit(number: int) -> None:
        planes, halves = _LAYOUTS[number]
        form = BlockFormat(planes, halves=halves)
        lines = []
        for i in range(PANEL):
            at = builder.add(apart, builder.mul(step, LONG(i)))
            lines.append(builder.load(builder.inttoptr(at, narrow.as_pointer()), align=1))
        # Process squares of 8 quads and 8 outputs.
        one, other = transpose(builder, lines[:QUADS]), transpose(builder, lines[QUADS:])
        groups = [shuffle(builder, *pair, range(PANEL)) for pair in zip(one, other, strict=True)]
        below = vectors = 0
        for plane, bits in enumerate(planes):
            made: list[Any] = [None] * bits
            for group, quads in enumerate(groups):
                at, up = form.place_of(plane, group)
                found, shift = quads, up - below
                if bits < 8:
                    if shift:
                        move = builder.shl if shift > 0 else builder.lshr
                        found = move(found, constant(abs(shift), PANEL, INT))
                    mask = (((1 << bits) - 1) << up) * 0x01010101
                    found = builder.and_(found, constant(mask, PANEL, INT))
                made[at] = found if made[at] is None else builder.or_(made[at], found)
            for vector, found in enumerate(made):
                at = builder.add(out, LONG(64 * (vectors + vector)))
                builder.store(found, builder.inttoptr(at, wide.as_pointer()), align=1)
            below, vectors = below + bits, vectors + bits

    switch(builder, layout, range(len(_LAYOUTS)), emit)


def _pack(
    kind: int,
    data: int,
    line: int,
    size: int,
    outputs: int,
    units: int,
    blocks: int,
    heads: int,
    factors: int,
    layout: int,
    vectors: int,
    codes: int,
    scales: int,
    start: int,
    stop: int,
) -> None:
    """Pack the panels `start` to `stop`.

    Args:
        kind: number of the type.
        data: address of the lines.
        line, size: bytes of a line, and of a unit.
        outputs: number of lines.
        units: number of units in a line.
        blocks: number of blocks in a unit.
        heads: number of float16 values in a unit.
        factors: number of factors in a block.
        layout: see `_cut`.
        vectors: number of vectors of 64 bytes in a block's codes.
        codes, scales: addresses of the codes and scales of the first panel, which are written.
        start, stop: panels.
    """
    halves, taken = np.zeros(heads, np.int16), np.zeros(max(1, factors * blocks), np.uint8)
    own = np.zeros((PANEL, BLOCK * blocks), np.uint8)
    apart = own.ctypes.data
    shorts = PANEL * heads + PANEL // 2 * factors * blocks
    for panel in range(start, stop):
        for unit in range(units):
            at = scales + 2 * shorts * (panel * units + unit)
            to_halves = shorts_at(at, WHOLE)[0]
            to_bytes = ubytes_at(at + 2 * PANEL * heads, WHOLE)[0]
            for i in range(PANEL):
                output = panel * PANEL + i
                if output < outputs:
                    raw, to = data + output * line + unit * size, apart + BLOCK * blocks * i
                    _take_apart(kind, raw, halves, taken, to)
                else:
                    halves[:], taken[:], own[i] = 0, 0, 0
                for j in range(heads):
                    to_halves[PANEL * j + i] = halves[j]
                for j in range(factors * blocks):
                    to_bytes[PANEL * j + i] = taken[j]
            number = (panel * units + unit) * blocks
            for block in range(blocks):
                to = codes + 64 * vectors * (number + block)
                _cut(layout, apart + BLOCK * block, BLOCK * blocks, to)
    keep(own)


_compiled_pack = compile_kernel(_pack)


def pack_blocks(kind: str, data: Any, codes: Tensor, scales: Tensor, first: int) -> bool:
    """Put lines of a file into panels; returns False for types that this kernel does not support.

    Args:
        kind: the type of the blocks.
        data: uint8 [outputs, bytes of a line], an array of NumPy.
        codes, scales: those of the whole weight, contiguous.
        first: the panel of the first line.
    """
    if kind not in _SIZES:
        return False
    lines = data if data.strides[1] == 1 and data.strides[0] > 0 else np.ascontiguousarray(data)
    form, outputs = BLOCK_TYPES[kind], len(lines)
    units = lines.shape[1] // _SIZES[kind]
    sizes = units, form.unit_blocks, form.heads, form.factors
    where = codes[first:].data_ptr(), scales[first:].data_ptr()
    layout = _LAYOUTS.index((form.planes, form.halves)), form.bits
    given = lines.ctypes.data, lines.strides[0], _SIZES[kind], outputs, *sizes, *layout

    def part(start: int, stop: int) -> None:
        _compiled_pack(KINDS.index(kind), *given, *where, start, stop)

    run_in_threads(part, -(-outputs // PANEL), max(1, lines.size // _WORTH_A_THREAD))
    return True
