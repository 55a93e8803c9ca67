"""How far keys lie from each other on the CPU, all of them from all, and who is the farthest.

Keys lie in *panels* of as many as there are numbers in a vector of the processor, side by side. A
tile has the distances between two panels, from differences, in float32: one load serves 8 or 16 of
them, and sums stay in registers until they are done. What is above the diagonal is made, and turned
over for what is below it. Each sum is added up in the order of a key's numbers. Roofline: a
difference, a product and a sum for each number of each pair, at the pace of the processor.

Written in LLVM's language, where vectors have as many numbers as one says (`linear_tiles`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import alloca_once_value, for_range, for_range_slice
from numba.extending import intrinsic

from weir.kernels.cpu.vectors import FLOAT, INT, LONG, everywhere, of_each, turned, vector_at


@intrinsic(prefer_literal=True)
def _tile(
    typing: Any,
    ours: Any,
    theirs: Any,
    dim: Any,
    out: Any,
    mirrored: Any,
    stride: Any,
    lanes: Any,
) -> Any:
    """Distances of the keys of one panel to those of another.

    Args:
        typing: of the call; numba's.
        ours, theirs: addresses of panels, float32 [dim, lanes].
        dim: numbers of a key.
        out: address of `out[i, j]`, how far ours[:, i] is from theirs[:, j].
        mirrored: address of `mirrored[j, i]`, the same.
        stride: numbers from a line of either to the next.
        lanes: 8 or 16, a constant.
    """
    width = lanes.literal_value
    vector = ir.VectorType(FLOAT, width)
    signature = types.void(*[types.uintp] * 6, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        ours_at, theirs_at, out_at, mirrored_at = (
            builder.inttoptr(given[place], FLOAT.as_pointer()) for place in (0, 1, 3, 4)
        )
        dim, stride = given[2], given[5]
        nothing = ir.Constant(vector, [0.0] * width)
        total = [alloca_once_value(builder, nothing) for _ in range(width)]

        with for_range(builder, dim) as loop:
            line = builder.mul(loop.index, LONG(width))
            other = builder.load(vector_at(builder, theirs_at, line, width), align=4)
            for i in range(width):
                number = builder.load(builder.gep(ours_at, [builder.add(line, LONG(i))]))
                apart = builder.fsub(other, everywhere(builder, number, width))
                square = builder.fmul(apart, apart, flags=("contract",))
                was = builder.load(total[i])
                builder.store(builder.fadd(was, square, flags=("contract",)), total[i])
        lines = [of_each(builder, "sqrt", builder.load(sums)) for sums in total]
        for start, distances in ((out_at, lines), (mirrored_at, turned(builder, lines))):
            for i, line in enumerate(distances):
                at = vector_at(builder, start, builder.mul(stride, LONG(i)), width)
                builder.store(line, at, align=4)
        return context.get_dummy_value()

    return signature, write


@intrinsic(prefer_literal=True)
def _nearer(
    typing: Any,
    distances: Any,
    weight: Any,
    reach: Any,
    count: Any,
    most: Any,
    where: Any,
    lanes: Any,
) -> Any:
    """`reach = min(reach, distances * weight)`, and the largest that is left.

    Args:
        typing: of the call; numba's.
        distances, weight, reach: addresses of float32 [count].
        count: a multiple of `lanes`.
        most: address of float32 [lanes]: of every so manieth place the largest, which is written.
        where: address of int32 [lanes]: its place, of equal ones the first, which is written.
        lanes: 8 or 16, a constant.
    """
    width = lanes.literal_value
    vector, whole = ir.VectorType(FLOAT, width), ir.VectorType(INT, width)
    signature = types.void(*[types.uintp] * 6, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        distances_at, weight_at, reach_at, most_at = (
            builder.inttoptr(given[place], FLOAT.as_pointer()) for place in (0, 1, 2, 4)
        )
        where_at = builder.inttoptr(given[5], whole.as_pointer())
        top = alloca_once_value(builder, ir.Constant(vector, [-math.inf] * width))
        best = alloca_once_value(builder, ir.Constant(whole, [0] * width))
        index = alloca_once_value(builder, ir.Constant(whole, list(range(width))))

        def at(start: Any, place: Any) -> Any:
            return vector_at(builder, start, place, width)

        with for_range_slice(builder, LONG(0), given[3], LONG(width)) as (place, _):
            far, factor, was = (
                builder.load(at(start, place), align=4)
                for start in (distances_at, weight_at, reach_at)
            )
            far = builder.fmul(far, factor)
            now = builder.select(builder.fcmp_ordered("<", far, was), far, was)
            builder.store(now, at(reach_at, place), align=4)
            most_yet, best_yet, here = builder.load(top), builder.load(best), builder.load(index)
            more = builder.fcmp_ordered(">", now, most_yet)
            builder.store(builder.select(more, now, most_yet), top)
            builder.store(builder.select(more, here, best_yet), best)
            builder.store(builder.add(here, ir.Constant(whole, [width] * width)), index)
        builder.store(builder.load(top), at(most_at, LONG(0)), align=4)
        builder.store(builder.load(best), where_at, align=4)
        return context.get_dummy_value()

    return signature, write


@njit(nogil=True)
def pairs(keys: np.ndarray, widest: int, panels: np.ndarray, out: np.ndarray) -> None:
    """Distances of all keys to all.

    Args:
        keys: float32 [n, dim].
        widest: `lanes()`.
        panels: room for the keys [panels, dim * widest], float32; as many panels as hold them all.
        out: float32 [panels * widest, panels * widest], which is written; lines and columns of no
            key mean nothing.
    """
    count, dim = keys.shape
    for panel in range(len(panels)):
        group = panels[panel]
        for lane in range(widest):
            place = panel * widest + lane
            if place < count:
                key = keys[place]
                for j in range(dim):
                    group[j * widest + lane] = key[j]
            else:
                for j in range(dim):
                    group[j * widest + lane] = np.float32(0.0)
    stride, size = out.shape[1], 4 * panels.shape[1]
    start, square = panels.ctypes.data, out.ctypes.data
    for i in range(len(panels)):
        for j in range(i, len(panels)):
            ours, theirs = start + i * size, start + j * size
            above = square + 4 * widest * (i * stride + j)
            below = square + 4 * widest * (j * stride + i)
            if widest == 16:
                _tile(ours, theirs, dim, above, below, stride, 16)
            else:
                _tile(ours, theirs, dim, above, below, stride, 8)


@njit(nogil=True)
def nearer(
    distances: np.ndarray,
    weight: np.ndarray,
    reach: np.ndarray,
    widest: int,
    most: np.ndarray,
    where: np.ndarray,
) -> tuple[float, int]:
    """`reach = min(reach, distances * weight)`; the largest that is left, and its first place.

    Args:
        distances: of a line of `pairs` [n], n a multiple of `widest`.
        weight: of each key [n], float32.
        reach: [n], float32, written over.
        widest: `lanes()`.
        most, where: room for `widest` numbers, float32 and int32.
    """
    at = distances.ctypes.data, weight.ctypes.data, reach.ctypes.data
    room = most.ctypes.data, where.ctypes.data
    if widest == 16:
        _nearer(at[0], at[1], at[2], len(reach), room[0], room[1], 16)
    else:
        _nearer(at[0], at[1], at[2], len(reach), room[0], room[1], 8)
    largest, place = most[0], where[0]
    for lane in range(1, widest):
        if most[lane] > largest or (most[lane] == largest and where[lane] < place):
            largest, place = most[lane], where[lane]
    return largest, place
