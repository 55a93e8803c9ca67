"""Building blocks of kernels that are written in LLVM's language, through llvmlite.

LLVM decides how it vectorizes a loop, and its code usually does not keep sums in registers. For
parts of a kernel where this matters, this module emits explicit code for vectors of 8 or 16 numbers
(`lanes`), which numba calls like any function.

Some kernels interleave vectors in *panels* of as many vectors as the processor's registers have
lanes: number `i` of vector `lane` is at place `i * lanes + lane`. One load then serves all of them.
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
"""LLVM's name for rounding only once after a product and a sum."""


@lru_cache
def lanes() -> int:
    """Return how many numbers a vector has: 16 if the processor has 32 registers of 16 numbers,
    otherwise 8.
    """
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


# --- from numba to LLVM


def llvm_function(emit: Callable[..., None], apart: bool = False) -> Any:
    """Make a function for numba from one that emits LLVM code.

    Args:
        emit: called as `emit(builder, *arguments)`. Integers, including addresses, have 64 bits,
            and a float32 stays a float32. For an array, `emit` gets a pointer to the first number.
        apart: whether to emit the code once for all callers, which is better for long code.
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

        # In numba, an address plus a signed number is a float64, which holds any address exactly.
        # So arguments that are float64 are converted to addresses.
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
    """Emit code for each of the choices; the code for the choice that equals `number` runs."""
    for choice in choices:
        with builder.if_then(builder.icmp_unsigned("==", number, LONG(choice))):
            emit(choice)


def for_lanes(builder: ir.IRBuilder, lanes: Any, emit: Callable[[int], None]) -> None:
    """Emit code for vectors of 8 and of 16 numbers; the code for the size that equals `lanes`
    runs.
    """
    switch(builder, lanes, (8, 16), emit)


@intrinsic
def as_float(_typing: Any, number: Any) -> Any:
    """Convert a stored number (float32, int8, or a bfloat16's bits as int16) to float32."""

    def write(_context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        return widen(builder, given[0])

    return types.float32(number), write


# --- code for vectors


def floats(builder: ir.IRBuilder, address: Any) -> Any:
    """Convert an address to a pointer to float32."""
    return builder.inttoptr(address, FLOAT.as_pointer())


def vector_at(builder: ir.IRBuilder, start: Any, place: Any, width: int) -> Any:
    """Return a pointer to a vector, `place` numbers after the pointer `start`."""
    kind = ir.VectorType(start.type.pointee, width).as_pointer()
    return builder.bitcast(builder.gep(start, [place]), kind)


def load_at(builder: ir.IRBuilder, start: Any, place: Any, width: int) -> Any:
    """Load the float32 vector `place` numbers after the pointer `start`."""
    return builder.load(vector_at(builder, start, place, width), align=4)


def store_at(builder: ir.IRBuilder, vector: Any, start: Any, place: Any) -> None:
    """Store a float32 vector `place` numbers after the pointer `start`."""
    builder.store(vector, vector_at(builder, start, place, vector.type.count), align=4)


def constant(number: float, width: int, kind: Any = FLOAT) -> Any:
    """Return a constant vector with copies of one number."""
    return ir.Constant(ir.VectorType(kind, width), [number] * width)


def shuffle(builder: ir.IRBuilder, one: Any, other: Any, places: Sequence[int]) -> Any:
    """Return a vector of the numbers at some places of two vectors; places of the second follow
    those of the first.
    """
    index = ir.Constant(ir.VectorType(INT, len(places)), list(places))
    return builder.shuffle_vector(one, other, index)


def broadcast(builder: ir.IRBuilder, number: Any, width: int) -> Any:
    """Return a vector with copies of one number."""
    undefined = ir.Constant(ir.VectorType(FLOAT, width), ir.Undefined)
    alone = builder.insert_element(undefined, number, INT(0))
    return shuffle(builder, alone, alone, [0] * width)


def widen(builder: ir.IRBuilder, number: Any) -> Any:
    """Convert a stored number, or a vector of them, to float32; bfloat16 is the upper half of
    float32.
    """
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
    """Compute `x * factor + term`, in one instruction if possible."""
    return builder.fadd(builder.fmul(x, factor, flags=MATH), term, flags=MATH)


def add_product(builder: ir.IRBuilder, total: Any, one: Any, other: Any) -> None:
    """Add `one * other` to the sum at the pointer `total`."""
    product = builder.fmul(one, other, flags=MATH)
    builder.store(builder.fadd(builder.load(total), product, flags=MATH), total)


def prefetch(builder: ir.IRBuilder, place: Any, level: int = 2) -> None:
    """Prefetch the cache line at an address into the processor's cache of level 1 or 2. There does
    not have to be memory at the address.
    """
    anything = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [anything, INT, INT, INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", (anything,), kind)
    builder.call(function, [place, INT(0), INT(4 - level), INT(1)])  # to read


def call_for_each(builder: ir.IRBuilder, name: str, x: Any) -> Any:
    """Apply one of LLVM's own functions, such as sqrt or floor, to each number of a vector."""
    kind = ir.FunctionType(x.type, (x.type,))
    function = builder.module.declare_intrinsic(f"llvm.{name}.v{x.type.count}f32", (), kind)
    return builder.call(function, [x])


def transpose(builder: ir.IRBuilder, lines: list[Any]) -> list[Any]:
    """Transpose a square of vectors.

    This swaps the two numbers next to the diagonal of each square of 2, then the two blocks next to
    the diagonal of each square of 4, and so on.
    """
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
    """Compute the vectors `total[i] = sum over j of x[j] * numbers[j * step + i]`, one for each `i`
    below `width`.

    Sums stay in registers until they are complete, and are added in the order of `j`.

    Args:
        builder: builds the code.
        x: pointer to vectors [count].
        numbers: pointer to floats; those for consecutive `j` are `step` apart.
        count, step: 64-bit numbers.
        width: lanes in a vector.
        add: a function that adds a term, made of two vectors, to a sum; by default their product.
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
    """Compute the inner products of the vectors of two panels, `out[i, j] = <numbers[:, i], x[:,
    j]>`.

    Args:
        builder: builds the code.
        x, numbers: addresses of panels, float32 [count, lanes].
        count: numbers in a vector.
        out: address of the output, float32 [lanes, lanes].
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
    """Compute `out[i, lane] = lines[lane, i] * factor` for a square of numbers.

    Args:
        builder: builds the code.
        lines: address of float32; lines are `step` numbers apart.
        step: see `lines`.
        out: address of the output, float32 [lanes, lanes].
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
    """Make a panel of the lines [dim] from place `at` on, `step` apart, multiplied by `factor`."""
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
    """Make a panel of `lanes` rows of `x`, from `first` on; rows after the last are zeros."""
    rows, dim = x.shape
    for lane in range(lanes):
        if first + lane < rows:
            row = x[first + lane]
            for j in range(dim):
                out[j * lanes + lane] = row[j]
        else:
            for j in range(dim):
                out[j * lanes + lane] = np.float32(0.0)
