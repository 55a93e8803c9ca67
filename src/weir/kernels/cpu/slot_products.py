"""The two products of attention of one query a head, over slots as they lie: dots and sums.

Few query heads share a KV head, so that each number of a key or value serves few multiplications.
Loops of Python's leave sums in memory or add up parts for every slot by itself, and then take
longer than reading does. Here sums stay in the processor's registers: four keys for three query
heads, or four vectors of a value for three query heads. The four keys lie far from each other:
processors fetch ahead what is read in order, and several such streams came faster than one, unlike
those of values.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range_slice
from numba.extending import intrinsic

from weir.kernels.cpu.vectors import BYTE, FLOAT, INT, LONG, add_product, everywhere

STREAMS = 4
"""Keys that are read at once."""
VECTORS = 4
"""Vectors of a value that are summed at once."""
_AT_ONCE = 4
"""Values that are added before it is asked whether there are more."""


@intrinsic(prefer_literal=True)
def dots(
    typing: Any,
    queries: Any,
    slots: Any,
    first: Any,
    step: Any,
    dim: Any,
    logits: Any,
    count: Any,
    lanes: Any,
    members: Any,
) -> Any:
    """`logits[member, i * step] = sum over j of queries[member, j] * slots[i * step, j]`.

    For `i` below STREAMS.

    Args:
        typing: of the call; numba's.
        queries: address of float32 [members, dim as a multiple of lanes]; the last vector of each
            is of the last `lanes` numbers, and 0 where the one before had them.
        slots: an array, float32, int8, or the bits of bfloat16 as int16.
        first: where in it the first of the four slots begins.
        step: slots from one of the four to the next.
        dim: at least `lanes`.
        logits: address of the first of the logits [members, count], which are written.
        count: logits of each member.
        lanes: numbers of a vector, 8 or 16, a constant.
        members: query heads, a constant.
    """
    width, heads = lanes.literal_value, members.literal_value
    signature = types.void(types.uintp, slots, *[types.uintp] * 5, lanes, members)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        asked, _, begin, far, size, found, row = given[:7]
        numbers = context.make_array(slots)(context, builder, given[1]).data
        question = builder.inttoptr(asked, FLOAT.as_pointer())
        nothing = ir.Constant(ir.VectorType(FLOAT, width), [0.0] * width)
        total = [
            [alloca_once_value(builder, nothing) for _ in range(STREAMS)] for _ in range(heads)
        ]
        padded = _padded(builder, size, width)
        apart = builder.mul(far, size)
        last = builder.sub(size, LONG(width))
        starts = [builder.add(begin, builder.mul(apart, LONG(i))) for i in range(STREAMS)]
        rows = [builder.mul(padded, LONG(member)) for member in range(heads)]
        with for_range_slice(builder, LONG(0), size, LONG(width)) as (j, _):
            place = builder.select(builder.icmp_unsigned("<", j, last), j, last)
            read = [_vector(builder, numbers, builder.add(start, place), width) for start in starts]
            for member in range(heads):
                query = _vector(builder, question, builder.add(rows[member], j), width)
                for i in range(STREAMS):
                    add_product(builder, total[member][i], query, read[i])
        for member in range(heads):
            parts = [builder.load(each) for each in total[member]]
            four = _added(builder, parts, width)
            for i in range(STREAMS):
                index = builder.add(builder.mul(row, LONG(member)), builder.mul(far, LONG(i)))
                to = builder.inttoptr(found, FLOAT.as_pointer())
                builder.store(builder.extract_element(four, INT(i)), builder.gep(to, [index]))
        return context.get_dummy_value()

    return signature, write


@intrinsic(prefer_literal=True)
def sums(
    typing: Any,
    weights: Any,
    count: Any,
    slots: Any,
    first: Any,
    dim: Any,
    answers: Any,
    lanes: Any,
    members: Any,
) -> Any:
    """`answers[member, j] = sum over i of weights[member, i] * slots[i, j]`.

    For `j` below `lanes * VECTORS`.

    Args:
        typing: of the call; numba's.
        weights: address of float32 [members, count].
        count: slots.
        slots: an array, float32, int8, or the bits of bfloat16 as int16.
        first: where in it the slots [count, dim] begin, or a later number of the first of them.
        dim: of a slot, and of an answer.
        answers: address of the same number of the first of the answers [members, dim], float32.
        lanes: numbers of a vector, 8 or 16, a constant.
        members: query heads, a constant.
    """
    width, heads = lanes.literal_value, members.literal_value
    signature = types.void(*[types.uintp] * 2, slots, *[types.uintp] * 3, lanes, members)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        factors, number, _, begin, size, found = given[:6]
        numbers = context.make_array(slots)(context, builder, given[2]).data
        vector = ir.VectorType(FLOAT, width)
        nothing = ir.Constant(vector, [0.0] * width)
        total = [
            [alloca_once_value(builder, nothing) for _ in range(VECTORS)] for _ in range(heads)
        ]
        weight = builder.inttoptr(factors, FLOAT.as_pointer())
        rows = [builder.mul(number, LONG(member)) for member in range(heads)]

        def step(slot: Any) -> None:
            start = builder.add(begin, builder.mul(slot, size))
            read = [
                _vector(builder, numbers, builder.add(start, LONG(c * width)), width)
                for c in range(VECTORS)
            ]
            for member in range(heads):
                one = builder.load(builder.gep(weight, [builder.add(rows[member], slot)]))
                shared = everywhere(builder, one, width)
                for c in range(VECTORS):
                    add_product(builder, total[member][c], shared, read[c])

        whole = builder.and_(number, LONG(-_AT_ONCE))
        with for_range_slice(builder, LONG(0), whole, LONG(_AT_ONCE)) as (slot, _):
            for i in range(_AT_ONCE):
                step(builder.add(slot, LONG(i)))
        with for_range_slice(builder, whole, number, LONG(1)) as (slot, _):
            step(slot)
        for member in range(heads):
            for c in range(VECTORS):
                index = builder.add(builder.mul(size, LONG(member)), LONG(c * width))
                to = builder.gep(builder.inttoptr(found, FLOAT.as_pointer()), [index])
                place = builder.bitcast(to, vector.as_pointer())
                builder.store(builder.load(total[member][c]), place, align=4)
        return context.get_dummy_value()

    return signature, write


def _padded(builder: ir.IRBuilder, size: Any, width: int) -> Any:
    """The next multiple of a vector's numbers."""
    return builder.and_(builder.add(size, LONG(width - 1)), LONG(-width))


def _vector(builder: ir.IRBuilder, numbers: Any, index: Any, width: int) -> Any:
    """Numbers in a row, as float32; those in bfloat16 are the upper halves of such."""
    kind = numbers.type.pointee
    place = builder.gep(numbers, [index])
    place = builder.bitcast(place, ir.VectorType(kind, width).as_pointer())
    if kind == FLOAT:
        return builder.load(place, align=4)
    if kind == BYTE:
        return builder.sitofp(builder.load(place, align=1), ir.VectorType(FLOAT, width))
    bits = ir.VectorType(INT, width)
    read = builder.zext(builder.load(place, align=2), bits)
    raised = builder.shl(read, ir.Constant(bits, [16] * width))
    return builder.bitcast(raised, ir.VectorType(FLOAT, width))


def _added(builder: ir.IRBuilder, parts: list[Any], width: int) -> Any:
    """A vector of the sums of four vectors each, whose numbers are added by pairs that lie in the
    same quarter first, as processors do without moving any to another one.
    """
    quarters = range(0, width, 4)

    def pairs(one: Any, other: Any) -> Any:
        def every(odd: int) -> Any:
            at = [
                quarter + i + (0 if half == 0 else width)
                for quarter in quarters
                for half in (0, 1)
                for i in (odd, odd + 2)
            ]
            mask = ir.Constant(ir.VectorType(INT, width), at)
            return builder.shuffle_vector(one, other, mask)

        return builder.fadd(every(0), every(1))

    a, b, c, d = parts
    four = pairs(pairs(a, b), pairs(c, d))
    while width > 4:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                four,
                four,
                ir.Constant(ir.VectorType(INT, width), list(range(first, first + width))),
            )
            for first in (0, width)
        )
        four = builder.fadd(low, high)
    return four
