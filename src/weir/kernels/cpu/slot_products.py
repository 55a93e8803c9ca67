"""The two products of attention of one query a head, over slots as they lie in memory.

Few query heads share a KV head, so that each number of a key or value serves few multiplications.
Loops in Python leave sums in memory or add up parts for every slot by itself, and then take longer
than reading does. Here sums stay in the processor's registers: four keys for three query heads, or
four vectors of a value for three query heads. The four keys lie far from each other: processors
fetch ahead what is read in order, and several such streams came faster than one, unlike those of
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once_value, for_range_slice

from weir.kernels.cpu.vectors import (
    LONG,
    add_product,
    broadcast,
    constant,
    floats,
    for_lanes,
    llvm_function,
    load_at,
    shuffle,
    store_at,
    switch,
    vector_at,
    widen,
)

VECTORS = 4
"""Vectors of a value that are summed at once."""
_STREAMS = 4
"""Keys that are read at once."""
_MEMBERS = 3
"""Query heads that are served at once."""
_AT_ONCE = 4
"""Values that are added before it is asked whether there are more."""


@llvm_function
def _dot_four(
    builder: ir.IRBuilder,
    queries: Any,
    slots: Any,
    first: Any,
    step: Any,
    dim: Any,
    logits: Any,
    count: Any,
    lanes: Any,
    members: Any,
) -> None:
    """`logits[member, i * step] = sum over j of queries[member, j] * slots[i * step, j]`.

    For `i` below _STREAMS.

    Args:
        builder: of the code.
        queries: address of float32 [members, dim as a multiple of lanes], of `pad_query`.
        slots: an array, float32, int8, or the bits of bfloat16 as int16.
        first: where in it the first of the four slots begins.
        step: slots from one of the four to the next.
        dim: at least `lanes`.
        logits: address of the first of the logits [members, count], which are written.
        count: logits of each member.
        lanes: numbers of a vector, 8 or 16.
        members: query heads, 1 to _MEMBERS.
    """

    def emit(width: int, heads: int) -> None:
        asked, found = floats(builder, queries), floats(builder, logits)
        total = [
            [alloca_once_value(builder, constant(0.0, width)) for _ in range(_STREAMS)]
            for _ in range(heads)
        ]
        padded = builder.and_(builder.add(dim, LONG(width - 1)), LONG(-width))
        apart, last = builder.mul(step, dim), builder.sub(dim, LONG(width))
        starts = [builder.add(first, builder.mul(apart, LONG(i))) for i in range(_STREAMS)]
        rows = [builder.mul(padded, LONG(member)) for member in range(heads)]
        with for_range_slice(builder, LONG(0), dim, LONG(width)) as (j, _):
            place = builder.select(builder.icmp_unsigned("<", j, last), j, last)
            read = [_load(builder, slots, builder.add(start, place), width) for start in starts]
            for member in range(heads):
                query = load_at(builder, asked, builder.add(rows[member], j), width)
                for i in range(_STREAMS):
                    add_product(builder, total[member][i], query, read[i])
        for member in range(heads):
            four = _add_up(builder, [builder.load(sums) for sums in total[member]])
            for i in range(_STREAMS):
                index = builder.add(builder.mul(count, LONG(member)), builder.mul(step, LONG(i)))
                number = builder.extract_element(four, ir.IntType(32)(i))
                builder.store(number, builder.gep(found, [index]))

    _for_members(builder, lanes, members, emit)


@llvm_function
def _sum_vectors(
    builder: ir.IRBuilder,
    shares: Any,
    apart: Any,
    count: Any,
    slots: Any,
    first: Any,
    dim: Any,
    answers: Any,
    lanes: Any,
    members: Any,
) -> None:
    """`answers[member, j] = sum over i of shares[member, i] * slots[i, j]`.

    For `j` below `lanes * VECTORS`.

    Args:
        builder: of the code.
        shares: address of float32 [members, count].
        apart: numbers from one member's shares to the next's.
        count: slots.
        slots: an array, float32, int8, or the bits of bfloat16 as int16.
        first: where in it the slots [count, dim] begin, or a later number of the first of them.
        dim: of a slot, and of an answer.
        answers: address of the same number of the first of the answers [members, dim], float32.
        lanes: numbers of a vector, 8 or 16.
        members: query heads, 1 to _MEMBERS.
    """

    def emit(width: int, heads: int) -> None:
        factors, found = floats(builder, shares), floats(builder, answers)
        total = [
            [alloca_once_value(builder, constant(0.0, width)) for _ in range(VECTORS)]
            for _ in range(heads)
        ]
        rows = [builder.mul(apart, LONG(member)) for member in range(heads)]

        def step(slot: Any) -> None:
            start = builder.add(first, builder.mul(slot, dim))
            read = [
                _load(builder, slots, builder.add(start, LONG(part * width)), width)
                for part in range(VECTORS)
            ]
            for member in range(heads):
                share = builder.load(builder.gep(factors, [builder.add(rows[member], slot)]))
                shared = broadcast(builder, share, width)
                for part in range(VECTORS):
                    add_product(builder, total[member][part], shared, read[part])

        whole = builder.and_(count, LONG(-_AT_ONCE))
        with for_range_slice(builder, LONG(0), whole, LONG(_AT_ONCE)) as (slot, _):
            for i in range(_AT_ONCE):
                step(builder.add(slot, LONG(i)))
        with for_range_slice(builder, whole, count, LONG(1)) as (slot, _):
            step(slot)
        for member in range(heads):
            for part in range(VECTORS):
                place = builder.add(builder.mul(dim, LONG(member)), LONG(part * width))
                store_at(builder, builder.load(total[member][part]), found, place)

    _for_members(builder, lanes, members, emit)


def _for_members(
    builder: ir.IRBuilder, lanes: Any, members: Any, emit: Callable[[int, int], None]
) -> None:
    """Emit code for vectors of 8 or of 16 numbers and for each number of query heads."""

    def emit_for(width: int) -> None:
        switch(builder, members, range(1, _MEMBERS + 1), lambda heads: emit(width, heads))

    for_lanes(builder, lanes, emit_for)


def _load(builder: ir.IRBuilder, numbers: Any, place: Any, width: int) -> Any:
    """A vector of stored numbers, as float32."""
    size = {"float": 4, "i16": 2, "i8": 1}[str(numbers.type.pointee)]
    return widen(builder, builder.load(vector_at(builder, numbers, place, width), align=size))


def _add_up(builder: ir.IRBuilder, parts: list[Any]) -> Any:
    """A vector of the sums of four vectors each, whose numbers are added by pairs that lie in the
    same quarter first, as processors do without moving any to another one.
    """
    width = parts[0].type.count

    def add_pairs(one: Any, other: Any) -> Any:
        even, odd = (
            [
                quarter + i + half
                for quarter in range(0, width, 4)
                for half in (0, width)
                for i in (first, first + 2)
            ]
            for first in (0, 1)
        )
        return builder.fadd(*(shuffle(builder, one, other, places) for places in (even, odd)))

    a, b, c, d = parts
    four = add_pairs(add_pairs(a, b), add_pairs(c, d))
    while four.type.count > 4:
        half = four.type.count // 2
        halves = range(half), range(half, 2 * half)
        four = builder.fadd(*(shuffle(builder, four, four, places) for places in halves))
    return four


@njit(nogil=True)
def pad_query(query: np.ndarray, scale: np.float32, lanes: int, row: np.ndarray) -> None:
    """A scaled query as `dot_products` reads it, in vectors.

    The last vector is that of the last `lanes` numbers, with 0 where the one before had them.
    """
    dim = query.shape[0]
    row[:] = 0.0
    for i in range(dim // lanes * lanes):
        row[i] = query[i] * scale
    for i in range(dim // lanes * lanes, dim):
        row[row.shape[0] - dim + i] = query[i] * scale


@njit(nogil=True)
def dot_products(
    queries: np.ndarray,
    keys: np.ndarray,
    start: int,
    dim: int,
    logits: np.ndarray,
    place: int,
    number: int,
    lanes: int,
) -> None:
    """Logits of `number` slots into `logits` [group, count], from `place` on.

    Args:
        queries: of `pad_query` [group, dim as a multiple of lanes].
        keys: an array of slots, of which `start` is the first that is read.
        dim: of a key.
        logits: what is written.
        place, number: which of them.
        lanes: numbers of a vector, 8 or 16.
    """
    group, count = logits.shape
    part = number // _STREAMS
    for slot in range(part + number % _STREAMS):
        # The last few, where four does not divide them, are one slot four times.
        at, step = (slot, part) if slot < part else (slot + (_STREAMS - 1) * part, 0)
        for member in range(0, group, _MEMBERS):
            few = min(_MEMBERS, group - member)
            asked, found = queries[member:].ctypes.data, logits[member:, place + at :].ctypes.data
            _dot_four(asked, keys, (start + at) * dim, step, dim, found, count, lanes, few)


@njit(nogil=True)
def weighted_sums(
    shares: np.ndarray,
    place: int,
    number: int,
    values: np.ndarray,
    start: int,
    out: np.ndarray,
    lanes: int,
) -> None:
    """Answers [group, value_dim] of `number` slots, whose shares are those from `place` on.

    Args:
        shares: [group, count], contiguous.
        place, number: which of them.
        values: an array of slots, of which `start` is the first that is read.
        out: what is written; contiguous.
        lanes: numbers of a vector, 8 or 16; `lanes * VECTORS` is no more than value_dim.
    """
    (group, count), width = shares.shape, out.shape[1]
    for member in range(0, group, _MEMBERS):
        few = min(_MEMBERS, group - member)
        weights, answers = shares[member:, place:].ctypes.data, out[member:]
        for begin in range(0, width, lanes * VECTORS):
            column = min(begin, width - lanes * VECTORS)
            answer, first = answers[:, column:].ctypes.data, start * width + column
            _sum_vectors(weights, count, number, values, first, width, answer, lanes, few)
