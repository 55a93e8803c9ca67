"""Building blocks of kernels that are written in LLVM's language, through llvmlite.

LLVM makes vectors of a loop as it sees fit, and where sums have to stay in registers it mostly does
not. Such parts of a kernel are written out here: code that is emitted for vectors of 8 or of 16
numbers, as `lanes` says, and called from numba like any function.

Some kernels keep vectors side by side in *panels* of as many as the processor's vectors have lanes:
number `i` of vector `lane` is at place `i * lanes + lane`. One load then serves all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic

FLOAT, INT, LONG, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
CACHE_LINE = 64
"""Bytes that a processor reads from memory at once."""
MATH = ("contract",)
"""LLVM's name for rounding once after a product and a sum."""


@lru_cache
def lanes() -> int:
    """Numbers of a vector: 16 where the processor has 32 registers of 16 numbers, else 8."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


# --- from numba to LLVM


def llvm_function(emit: Callable[..., None], apart: bool = False) -> Any:
    """Make a function that numba compiles out of one that emits LLVM code.

    Args:
        emit: called as `emit(builder, *arguments)`. Integers, addresses among them, are of 64 bits,
            a float32 stays one; of an array it gets the address of the first number.
        apart: keep its code in one place, which all callers call: for code that is long.
    """

    @intrinsic
    @functools.wraps(emit)
    def function(_typing: Any, *kinds: Any) -> Any:
        def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
            arguments = [
                context.make_array(kind)(context, builder, value).data
                if isinstance(kind, types.Array)
                else value
                for kind, value in zip(kinds, given, strict=True)
            ]
            if not apart:
                emit(builder, *arguments)
                return context.get_dummy_value()
            name = f"{emit.__module__}.{emit.__name__}"
            called = builder.module.globals.get(name)
            if called is None:
                kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
                called = ir.Function(builder.module, kind, name)
                called.linkage = "linkonce_odr"
                called.attributes.add("noinline")
                inner = ir.IRBuilder(called.append_basic_block())
                emit(inner, *called.args)
                inner.ret_void()
            builder.call(called, arguments)
            return context.get_dummy_value()

        # To numba an address plus a signed number is a float64, which holds any address exactly.
        numbers = (types.Integer, types.Boolean)
        long = [
            types.uintp if isinstance(kind, numbers) or kind == types.float64 else kind
            for kind in kinds
        ]
        return types.void(*long), write

    return function


def switch(
    builder: ir.IRBuilder, number: Any, choices: Sequence[int], emit: Callable[[int], None]
) -> None:
    """Emit code for each of the choices; the one runs that `number` is equal to."""
    for choice in choices:
        with builder.if_then(builder.icmp_unsigned("==", number, LONG(choice))):
            emit(choice)


def for_lanes(builder: ir.IRBuilder, lanes: Any, emit: Callable[[int], None]) -> None:
    """Emit code for vectors of 8 numbers and of 16; the one runs that `lanes` is equal to."""
    switch(builder, lanes, (8, 16), emit)


@intrinsic
def as_float(_typing: Any, number: Any) -> Any:
    """float32 of a stored number: float32, int8, or the bits of bfloat16 as int16."""

    def write(_context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        return widen(builder, given[0])

    return types.float32(number), write


# --- code for vectors


def floats(builder: ir.IRBuilder, address: Any) -> Any:
    """A pointer to float32 from an address."""
    return builder.inttoptr(address, FLOAT.as_pointer())


def vector_at(builder: ir.IRBuilder, start: Any, place: Any, width: int) -> Any:
    """A pointer to a vector, `place` numbers behind the pointer `start`."""
    kind = ir.VectorType(start.type.pointee, width).as_pointer()
    return builder.bitcast(builder.gep(start, [place]), kind)


def load_at(builder: ir.IRBuilder, start: Any, place: Any, width: int) -> Any:
    """The vector of float32 `place` numbers behind the pointer `start`."""
    return builder.load(vector_at(builder, start, place, width), align=4)


def store_at(builder: ir.IRBuilder, vector: Any, start: Any, place: Any) -> None:
    """Write a vector of float32 `place` numbers behind the pointer `start`."""
    builder.store(vector, vector_at(builder, start, place, vector.type.count), align=4)


def constant(number: float, width: int, kind: Any = FLOAT) -> Any:
    """A constant vector of one number."""
    return ir.Constant(ir.VectorType(kind, width), [number] * width)


def shuffle(builder: ir.IRBuilder, one: Any, other: Any, places: Sequence[int]) -> Any:
    """A vector of the numbers at some places of two; those of the second follow the first's."""
    index = ir.Constant(ir.VectorType(INT, len(places)), list(places))
    return builder.shuffle_vector(one, other, index)


def broadcast(builder: ir.IRBuilder, number: Any, width: int) -> Any:
    """A vector of one number."""
    undefined = ir.Constant(ir.VectorType(FLOAT, width), ir.Undefined)
    alone = builder.insert_element(undefined, number, INT(0))
    return shuffle(builder, alone, alone, [0] * width)


def widen(builder: ir.IRBuilder, number: Any) -> Any:
    """float32 of a stored number or of a vector of them; bfloat16 is the upper half of float32."""
    kind = number.type
    several = isinstance(kind, ir.VectorType)
    stored = kind.element if several else kind
    wide, whole = (ir.VectorType(to, kind.count) if several else to for to in (FLOAT, INT))
    if stored == FLOAT:
        return number
    if stored == BYTE:
        return builder.sitofp(number, wide)
    half = constant(16, kind.count, INT) if several else INT(16)
    return builder.bitcast(builder.shl(builder.zext(number, whole), half), wide)


def multiply_add(builder: ir.IRBuilder, x: Any, factor: Any, term: Any) -> Any:
    """`x * factor + term`, in one instruction if there is one."""
    return builder.fadd(builder.fmul(x, factor, flags=MATH), term, flags=MATH)


def add_product(builder: ir.IRBuilder, total: Any, one: Any, other: Any) -> None:
    """Add `one * other` to the sum at the pointer `total`."""
    product = builder.fmul(one, other, flags=MATH)
    builder.store(builder.fadd(builder.load(total), product, flags=MATH), total)


def prefetch(builder: ir.IRBuilder, place: Any, level: int = 2) -> None:
    """Ask the processor to read the cache line at an address, which need not exist, into its first
    or second cache.
    """
    anything = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [anything, INT, INT, INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", (anything,), kind)
    builder.call(function, [place, INT(0), INT(4 - level), INT(1)])  # to read


def call_for_each(builder: ir.IRBuilder, name: str, x: Any) -> Any:
    """One of LLVM's own functions, such as sqrt or floor, of each number of a vector."""
    kind = ir.FunctionType(x.type, (x.type,))
    function = builder.module.declare_intrinsic(f"llvm.{name}.v{x.type.count}f32", (), kind)
    return builder.call(function, [x])


def transpose(builder: ir.IRBuilder, lines: list[Any]) -> list[Any]:
    """The columns of a square of vectors: blocks beside the diagonal change places, by halves."""
    lines, width, step = list(lines), len(lines), 1
    while step < width:
        for i in range(width):
            if i & step:
                continue
            one, two = lines[i], lines[i + step]
            above = [j if not j & step else width + j - step for j in range(width)]
            below = [j + step if not j & step else width + j for j in range(width)]
            lines[i], lines[i + step] = (shuffle(builder, one, two, at) for at in (above, below))
        step *= 2
    return lines


# --- panels


def combine(
    builder: ir.IRBuilder,
    x: Any,
    numbers: Any,
    count: Any,
    step: Any,
    width: int,
    add: Callable[[ir.IRBuilder, Any, Any, Any], None] = add_product,
) -> list[Any]:
    """`total[i] = sum over j of x[j] * numbers[j * step + i]`, as many vectors as one has lanes.

    Sums stay in registers until they are done, each in the order of `j`.

    Args:
        builder: of the code.
        x: pointer to vectors [count].
        numbers: pointer to floats, `step` from one `j` to the next.
        count, step: 64-bit numbers.
        width: lanes of a vector.
        add: what is added, in place of products.
    """
    total = [alloca_once_value(builder, constant(0.0, width)) for _ in range(width)]
    with for_range(builder, count) as loop:
        factor = load_at(builder, x, builder.mul(loop.index, LONG(width)), width)
        line = builder.gep(numbers, [builder.mul(loop.index, step)])
        for i, sums in enumerate(total):
            number = builder.load(builder.gep(line, [LONG(i)]))
            add(builder, sums, factor, broadcast(builder, number, width))
    return [builder.load(sums) for sums in total]


@llvm_function
def multiply(builder: ir.IRBuilder, x: Any, numbers: Any, count: Any, out: Any, lanes: Any) -> None:
    """Inner products of the vectors of two panels, `out[i, j] = <numbers[:, i], x[:, j]>`.

    Args:
        builder: of the code.
        x, numbers: addresses of panels, float32 [count, lanes].
        count: numbers of a vector.
        out: address of float32 [lanes, lanes], which are written.
        lanes: 8 or 16.
    """

    def emit(width: int) -> None:
        pointers = floats(builder, x), floats(builder, numbers)
        totals = combine(builder, *pointers, count, LONG(width), width)
        for i, total in enumerate(totals):
            store_at(builder, total, floats(builder, out), LONG(i * width))

    for_lanes(builder, lanes, emit)


@llvm_function
def _pack_square(
    builder: ir.IRBuilder, lines: Any, step: Any, out: Any, factor: Any, lanes: Any
) -> None:
    """`out[i, lane] = lines[lane, i] * factor` for a square of numbers.

    Args:
        builder: of the code.
        lines: address of float32, `step` numbers from a line to the next.
        step: as said.
        out: address of float32 [lanes, lanes], which are written.
        factor: float32.
        lanes: 8 or 16.
    """

    def emit(width: int) -> None:
        scale = broadcast(builder, factor, width)
        starts = (builder.mul(step, LONG(i)) for i in range(width))
        read = [load_at(builder, floats(builder, lines), start, width) for start in starts]
        for i, line in enumerate(transpose(builder, read)):
            store_at(builder, builder.fmul(line, scale), floats(builder, out), LONG(i * width))

    for_lanes(builder, lanes, emit)


@njit(nogil=True)
def pack(
    lines: np.ndarray, at: int, step: int, dim: int, factor: float, lanes: int, out: np.ndarray
) -> None:
    """A panel of lines [dim], multiplied by `factor`: those from place `at` on, `step` apart."""
    scale = np.float32(factor)
    start, to = lines[at:].ctypes.data, out.ctypes.data
    done = dim - dim % lanes
    for first in range(0, done, lanes):
        _pack_square(start + 4 * first, step, to + 4 * first * lanes, scale, lanes)
    for i in range(done, dim):
        for lane in range(lanes):
            out[i * lanes + lane] = lines[at + lane * step + i] * scale


@njit(nogil=True)
def pack_rows(x: np.ndarray, first: int, lanes: int, out: np.ndarray) -> None:
    """A panel of `lanes` rows of `x`, from `first` on; rows behind the last are zeros."""
    rows, dim = x.shape
    for lane in range(lanes):
        if first + lane < rows:
            row = x[first + lane]
            for j in range(dim):
                out[j * lanes + lane] = row[j]
        else:
            for j in range(dim):
                out[j * lanes + lane] = np.float32(0.0)
