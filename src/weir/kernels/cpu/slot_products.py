"""The two products of attention with one query per head, over slots as they are stored.

Few query heads share a KV head, so each number of a key or value is used in few multiplications.
Loops that numba compiles from Python keep sums in memory, or add up the numbers of a vector for
every slot separately. Both take longer than reading the slots. Here, running sums stay in the
processor's registers: those of the products of four keys with three query heads, or those of four
vectors of a value for three query heads. The four keys are far apart in memory, because processors
prefetch memory that is read in order, and reading several such streams at once was faster. For
values, it was not.

Slots are given by the address of the first and the bits of a number: 32 for float32, 16 for
bfloat16, 8 for int8, 4 for two numbers in a byte, the ones at i and at i + dim / 2, each stored
with 8 added. A vector consists of *parts*: its halves if numbers have 4 bits, otherwise the whole
vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once, alloca_once_value, for_range, for_range_slice
from numba.extending import register_jitable

from weir.kernels.cpu.compilation import WHOLE, bytes_at, floats_at, shorts_at
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
    llvm_function,
    load_at,
    prefetch,
    shuffle,
    store_at,
    switch,
    vector_at,
    widen,
)

VECTORS = 4
"""Largest number of vectors of a value that are summed at once."""
_STREAMS = 4
"""Number of keys that are read at once."""
_MEMBERS = 3
"""Number of query heads that are processed at once."""
_AT_ONCE = 4
"""Number of slots whose values are added in one pass of the loop."""
AHEAD = 128
"""Bytes to prefetch for each slot, from memory that is read later: as many as arrive while the slot
is processed.
"""
_KINDS = {4: BYTE, 8: BYTE, 16: ir.IntType(16), 32: ir.FloatType()}
"""LLVM's types of stored numbers, by their bits; two of 4 bits share a byte."""


@partial(llvm_function, apart=True)
def _dot_streams(
    builder: ir.IRBuilder,
    queries: Any,
    slots: Any,
    bits: Any,
    step: Any,
    times: Any,
    dim: Any,
    logits: Any,
    count: Any,
    lanes: Any,
    members: Any,
    ahead: Any,
    stop: Any,
) -> None:
    """Compute `logits[member, s] = sum over j of queries[member, j] * slots[s, j]` for some slots
    `s`.

    These slots are `i * step + slot`, for `i` below _STREAMS and `slot` below `times`.

    Args:
        builder: builds the code.
        queries: address of float32 [members, parts, numbers of a part rounded up to a multiple of
            lanes], from `pad_query`.
        slots: address of the first slot.
        bits: bits of each of their numbers.
        step: distance between two of the _STREAMS slots that are read at once, in slots.
        times: how often _STREAMS slots are read.
        dim: at least `lanes`, or twice that if `bits` is 4.
        logits: address of the first of the output logits [members, count].
        count: number of logits of each query head.
        lanes: numbers in a vector, 8 or 16.
        members: number of query heads, 1 to _MEMBERS.
        ahead, stop: addresses of memory that is prefetched.
    """

    def emit(width: int, heads: int, kind: int) -> None:
        asked, found = floats(builder, queries), floats(builder, logits)
        numbers = builder.inttoptr(slots, _KINDS[kind].as_pointer())
        parts = 2 if kind == 4 else 1
        part = builder.udiv(dim, LONG(parts))
        nothing = constant(0.0, width)
        total = [
            [alloca_once(builder, nothing.type) for _ in range(_STREAMS)] for _ in range(heads)
        ]
        padded = builder.and_(builder.add(part, LONG(width - 1)), LONG(-width))
        last = builder.sub(part, LONG(width))
        apart = [builder.mul(builder.mul(step, part), LONG(i)) for i in range(_STREAMS)]
        with for_range(builder, times) as loop:
            slot = loop.index
            place = builder.add(ahead, builder.mul(slot, LONG(_STREAMS * AHEAD)))
            with builder.if_then(builder.icmp_unsigned("<", place, stop)):
                _ask(builder, place)
            for sums in (each for member in total for each in member):
                builder.store(nothing, sums)
            starts = [builder.add(far, builder.mul(slot, part)) for far in apart]
            with for_range_slice(builder, LONG(0), part, LONG(width)) as (j, _):
                place = builder.select(builder.icmp_unsigned("<", j, last), j, last)
                for i, start in enumerate(starts):
                    read = _load(builder, numbers, builder.add(start, place), width, kind)
                    for member in range(heads):
                        for half in range(parts):
                            row = builder.mul(padded, LONG(member * parts + half))
                            query = load_at(builder, asked, builder.add(row, j), width)
                            add_product(builder, total[member][i], query, read[half])
            for member in range(heads):
                four = _add_up(builder, [builder.load(sums) for sums in total[member]])
                first = builder.add(builder.mul(count, LONG(member)), slot)
                for i in range(_STREAMS):
                    index = builder.add(first, builder.mul(step, LONG(i)))
                    number = builder.extract_element(four, INT(i))
                    builder.store(number, builder.gep(found, [index]))

    _for_members(builder, lanes, members, bits, emit)


@register_jitable
def _summed(bits: int, lanes: int) -> int:
    """Return the number of vectors of a value that are summed at once: fewer if there are few
    registers, because one sum in memory delays all others.
    """
    return VECTORS // 2 if bits == 4 and lanes == 8 else VECTORS


@partial(llvm_function, apart=True)
def _sum_vectors(
    builder: ir.IRBuilder,
    shares: Any,
    apart: Any,
    count: Any,
    slots: Any,
    bits: Any,
    dim: Any,
    column: Any,
    answers: Any,
    lanes: Any,
    members: Any,
    ahead: Any,
) -> None:
    """Compute `answers[member, j] = sum over i of shares[member, i] * slots[i, j]`.

    This covers `_summed` vectors of `j`, from `column` on; with two halves, half as many in each
    half.

    Args:
        builder: builds the code.
        shares: address of float32 [members, count].
        apart: distance between the shares of two query heads, in numbers.
        count: number of slots.
        slots: address of the slots [count, dim].
        bits: bits of each of their numbers.
        dim: numbers in a slot, and in an answer.
        column: the first number of a part that is summed.
        answers: address of the answers [members, dim], float32.
        lanes: numbers in a vector, 8 or 16.
        members: number of query heads, 1 to _MEMBERS.
        ahead: address of memory that is prefetched; 0 for none.
    """

    def emit(width: int, heads: int, kind: int) -> None:
        factors, found = floats(builder, shares), floats(builder, answers)
        numbers = builder.inttoptr(slots, _KINDS[kind].as_pointer())
        parts, several = 2 if kind == 4 else 1, _summed(kind, width)
        part, vectors = builder.udiv(dim, LONG(parts)), several // parts
        total = [
            [alloca_once_value(builder, constant(0.0, width)) for _ in range(several)]
            for _ in range(heads)
        ]
        rows = [builder.mul(apart, LONG(member)) for member in range(heads)]

        def step(slot: Any) -> None:
            start = builder.add(column, builder.mul(slot, part))
            shared = []
            for row in rows:
                share = builder.load(builder.gep(factors, [builder.add(row, slot)]))
                shared.append(broadcast(builder, share, width))
            for i in range(vectors):
                place = builder.add(start, LONG(i * width))
                for half, read in enumerate(_load(builder, numbers, place, width, kind)):
                    for member in range(heads):
                        add_product(builder, total[member][parts * i + half], shared[member], read)

        whole = builder.and_(count, LONG(-_AT_ONCE))
        with for_range_slice(builder, LONG(0), whole, LONG(_AT_ONCE)) as (slot, _):
            with builder.if_then(builder.icmp_unsigned("!=", ahead, LONG(0))):
                _ask(builder, builder.add(ahead, builder.mul(slot, LONG(AHEAD))))
            for i in range(_AT_ONCE):
                step(builder.add(slot, LONG(i)))
        with for_range_slice(builder, whole, count, LONG(1)) as (slot, _):
            step(slot)
        for member in range(heads):
            for i in range(several):
                place = builder.add(builder.mul(dim, LONG(member)), LONG(i // parts * width))
                place = builder.add(place, builder.mul(part, LONG(i % parts)))
                to = builder.add(place, column)
                store_at(builder, builder.load(total[member][i]), found, to)

    _for_members(builder, lanes, members, bits, emit)


def _ask(builder: ir.IRBuilder, address: Any) -> None:
    """Prefetch the memory that arrives while four slots are processed."""
    start = builder.inttoptr(address, BYTE.as_pointer())
    for line in range(0, _STREAMS * AHEAD, CACHE_LINE):
        prefetch(builder, builder.gep(start, [LONG(line)]))


def _for_members(
    builder: ir.IRBuilder,
    lanes: Any,
    members: Any,
    bits: Any,
    emit: Callable[[int, int, int], None],
) -> None:
    """Emit code for vectors of 8 or 16 numbers, for each number of query heads and kind of
    slots.
    """

    def emit_for(width: int) -> None:
        def emit_kind(kind: int) -> None:
            some = range(1, _MEMBERS + 1)
            switch(builder, members, some, lambda heads: emit(width, heads, kind))

        switch(builder, bits, list(_KINDS), emit_kind)

    for_lanes(builder, lanes, emit_for)


def _load(builder: ir.IRBuilder, numbers: Any, place: Any, width: int, kind: int) -> list[Any]:
    """Load a vector of stored numbers as float32. Bytes with two numbers give two vectors: one of
    the numbers in the low bits, and one of those in the high bits.
    """
    size = max(1, kind // 8)
    read = builder.load(vector_at(builder, numbers, place, width), align=size)
    if kind > 4:
        return [widen(builder, read)]
    whole = builder.zext(read, ir.VectorType(INT, width))
    low = builder.and_(whole, constant(15, width, INT))
    high = builder.lshr(whole, constant(4, width, INT))
    wide = ir.VectorType(ir.FloatType(), width)
    more = constant(8, width, INT)
    return [builder.sitofp(builder.sub(part, more), wide) for part in (low, high)]


def _add_up(builder: ir.IRBuilder, parts: list[Any]) -> Any:
    """Return a vector of four numbers: for each of four vectors, the sum of its numbers.

    Vectors consist of groups of four numbers. Numbers of the same group are added first, which
    processors can do without moving numbers to another group.
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
def padded(dim: int, parts: int, lanes: int) -> int:
    """Return how many numbers a query has in the form for `dot_products`."""
    return parts * ((dim // parts + lanes - 1) // lanes * lanes)


@njit(nogil=True)
def pad_query(query_at: int, scale: float, dim: int, parts: int, lanes: int, to: int) -> None:
    """Write a scaled query in the form for `dot_products`, with each of its parts in vectors.

    The last vector has the last `lanes` numbers, with 0 for those that are already in the vector
    before.

    Args:
        query_at: address of float32 [dim].
        scale: factor of the query.
        dim: numbers in the query.
        parts: 2 for slots of 4 bits, otherwise 1.
        lanes: numbers in a vector.
        to: address of the output, float32 [`padded`].
    """
    part, factor = dim // parts, np.float32(scale)
    whole, size = part // lanes * lanes, padded(dim, parts, lanes) // parts
    for half in range(parts):
        query = floats_at(query_at + 4 * half * part, (1, part))[0]
        row = floats_at(to + 4 * half * size, (1, size))[0]
        for i in range(whole):
            row[i] = query[i] * factor
        for i in range(whole, size):
            row[i] = np.float32(0.0)
        for i in range(whole, part):
            row[size - part + i] = query[i] * factor


@njit(nogil=True)
def _number(slots_at: int, bits: int, dim: int, slot: int, j: int) -> np.float32:
    """Load a number of a slot, for heads with too few numbers for vectors."""
    at = slot * dim + j
    if bits == 32:
        return floats_at(slots_at, WHOLE)[0, at]
    if bits == 16:
        return as_float(shorts_at(slots_at, WHOLE)[0, at])
    if bits == 8:
        return as_float(bytes_at(slots_at, WHOLE)[0, at])
    half = dim // 2
    pair = np.int32(bytes_at(slots_at, WHOLE)[0, slot * half + j % half])
    return np.float32(((pair >> (4 if j >= half else 0)) & 15) - 8)


@njit(nogil=True)
def dot_products(
    asked_at: int,
    group: int,
    slots_at: int,
    bits: int,
    dim: int,
    logits_at: int,
    apart: int,
    number: int,
    lanes: int,
    ahead: int,
    stop: int,
) -> None:
    """Compute the logits of some slots for each query.

    Args:
        asked_at: address of queries from `pad_query` [group, padded].
        group: number of queries.
        slots_at, bits, dim: address of the slots, bits of a number, and numbers in a slot.
        logits_at: address of the output, float32.
        apart: distance between the logits of two queries, in numbers.
        number: number of slots.
        lanes: numbers of a vector, 8 or 16; 1 for heads that are too small for vectors.
        ahead, stop: addresses of memory that is prefetched, `AHEAD` bytes per slot.
    """
    parts = 2 if bits == 4 else 1
    size, line = padded(dim, parts, lanes), dim * bits // 8
    if lanes == 1:
        asked, logits = floats_at(asked_at, WHOLE)[0], floats_at(logits_at, WHOLE)[0]
        for member in range(group):
            for slot in range(number):
                total = np.float32(0.0)
                for j in range(dim):
                    total += asked[member * dim + j] * _number(slots_at, bits, dim, slot, j)
                logits[member * apart + slot] = total
        return
    part, rest = number // _STREAMS, number % _STREAMS
    whole = number - rest
    for member in range(0, group, _MEMBERS):
        few = min(_MEMBERS, group - member)
        asked, found = asked_at + 4 * member * size, logits_at + 4 * member * apart
        how = apart, lanes, few
        _dot_streams(asked, slots_at, bits, part, part, dim, found, *how, ahead, stop)
        # If the number of slots is not divisible by four, each of the last ones is processed as
        # four equal slots.
        last, found = slots_at + whole * line, found + 4 * whole
        _dot_streams(asked, last, bits, 0, rest, dim, found, *how, 0, 0)
        ahead = stop


@njit(nogil=True)
def weighted_sums(
    shares_at: int,
    apart: int,
    number: int,
    group: int,
    slots_at: int,
    bits: int,
    dim: int,
    out_at: int,
    lanes: int,
    ahead: int,
    stop: int,
) -> None:
    """Compute answers [group, dim] from some slots.

    Args:
        shares_at: address of float32, the shares of each query.
        apart: distance between the shares of two queries, in numbers.
        number: number of slots.
        group: number of queries.
        slots_at, bits, dim: as in `dot_products`.
        out_at: address of the output, float32 [group, dim].
        lanes: numbers of a vector, 8 or 16, if `lanes * VECTORS` is at most `dim`; otherwise 1.
        ahead, stop: as in `dot_products`.
    """
    if lanes == 1:
        shares, out = floats_at(shares_at, WHOLE)[0], floats_at(out_at, (group, dim))
        for member in range(group):
            for j in range(dim):
                total = np.float32(0.0)
                for slot in range(number):
                    total += shares[member * apart + slot] * _number(slots_at, bits, dim, slot, j)
                out[member, j] = total
        return
    parts = 2 if bits == 4 else 1
    part, block = dim // parts, lanes * _summed(bits, lanes) // parts
    if ahead >= stop:
        ahead = 0
    for member in range(0, group, _MEMBERS):
        few = min(_MEMBERS, group - member)
        weights, answers = shares_at + 4 * member * apart, out_at + 4 * member * dim
        for begin in range(0, part, block):
            column = min(begin, part - block)
            given = weights, apart, number, slots_at, bits, dim, column, answers
            _sum_vectors(*given, lanes, few, ahead)
            ahead = 0
