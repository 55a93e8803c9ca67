"""How far keys lie from each other on the CPU, all of them from all, and who is the farthest.

Keys lie in *panels* of as many as there are numbers in a vector of the processor, side by side. A
tile has the distances between two panels, from differences, in float32: one load serves 8 or 16 of
them, and sums stay in registers until they are done. What is above the diagonal is made, and turned
over for what is below it. Each sum is added up in the order of a key's numbers. Roofline: a
difference, a product and a sum for each number of each pair, at the pace of the processor.

Written in LLVM's language, where vectors have as many numbers as one says (`numba_tiles`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import alloca_once_value, for_range, for_range_slice
from numba.extending import intrinsic

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def lanes() -> int:
    """Keys of a panel: 16 where the processor has 32 registers of so many numbers, or 8."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


@intrinsic(prefer_literal=True)
def _tile(
    typing: Any,
    ours: Any,
    theirs: Any,
    dim: Any,
    out: Any,
    turned: Any,
    stride: Any,
    lanes: Any,
) -> Any:
    """Distances of the keys of one panel to those of another.

    Args:
        typing: of the call; numba's.
        ours, theirs: addresses of panels, float32 [dim, lanes].
        dim: numbers of a key.
        out: address of `out[i, j]`, how far ours[:, i] is from theirs[:, j].
        turned: address of `turned[j, i]`, the same.
        stride: numbers from a line of either to the next.
        lanes: 8 or 16, a constant.
    """
    width = lanes.literal_value
    vector = ir.VectorType(_FLOAT, width)
    everywhere = ir.Constant(ir.VectorType(_INT, width), [0] * width)
    signature = types.void(*[types.uintp] * 6, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        ours_at, theirs_at, out_at, turned_at = (
            builder.inttoptr(given[place], _FLOAT.as_pointer()) for place in (0, 1, 3, 4)
        )
        dim, stride = given[2], given[5]
        nothing = ir.Constant(vector, [0.0] * width)
        total = [alloca_once_value(builder, nothing) for _ in range(width)]

        def place(start: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(start, [index]), vector.as_pointer())

        with for_range(builder, dim) as loop:
            line = builder.mul(loop.index, _LONG(width))
            other = builder.load(place(theirs_at, line), align=4)
            for i in range(width):
                number = builder.load(builder.gep(ours_at, [builder.add(line, _LONG(i))]))
                alone = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _INT(0))
                apart = builder.fsub(other, builder.shuffle_vector(alone, alone, everywhere))
                square = builder.fmul(apart, apart, flags=("contract",))
                was = builder.load(total[i])
                builder.store(builder.fadd(was, square, flags=("contract",)), total[i])
        root = builder.module.declare_intrinsic(
            f"llvm.sqrt.v{width}f32", (), ir.FunctionType(vector, (vector,))
        )
        lines = [builder.call(root, [builder.load(sums)]) for sums in total]
        for i, distances in enumerate(lines):
            at = place(out_at, builder.mul(stride, _LONG(i)))
            builder.store(distances, at, align=4)
        for i, distances in enumerate(_turned(builder, lines)):
            at = place(turned_at, builder.mul(stride, _LONG(i)))
            builder.store(distances, at, align=4)
        return context.get_dummy_value()

    return signature, write


def _turned(builder: ir.IRBuilder, lines: list[Any]) -> list[Any]:
    """The columns of a square of vectors: blocks beside the diagonal change places, by halves."""
    width, step = len(lines), 1
    lines = list(lines)
    while step < width:
        for i in range(width):
            if i & step:
                continue
            one, two = lines[i], lines[i + step]
            # Numbers of the second follow those of the first in the index of a shuffle.
            above = [j if not j & step else width + j - step for j in range(width)]
            below = [j + step if not j & step else width + j for j in range(width)]
            lines[i], lines[i + step] = (
                builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(_INT, width), index))
                for index in (above, below)
            )
        step *= 2
    return lines


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
    vector, whole = ir.VectorType(_FLOAT, width), ir.VectorType(_INT, width)
    signature = types.void(*[types.uintp] * 6, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        distances_at, weight_at, reach_at, most_at = (
            builder.inttoptr(given[place], _FLOAT.as_pointer()) for place in (0, 1, 2, 4)
        )
        where_at = builder.inttoptr(given[5], whole.as_pointer())
        top = alloca_once_value(builder, ir.Constant(vector, [-math.inf] * width))
        best = alloca_once_value(builder, ir.Constant(whole, [0] * width))
        index = alloca_once_value(builder, ir.Constant(whole, list(range(width))))

        def vector_at(start: Any, place: Any) -> Any:
            return builder.bitcast(builder.gep(start, [place]), vector.as_pointer())

        with for_range_slice(builder, _LONG(0), given[3], _LONG(width)) as (place, _):
            far, factor, was = (
                builder.load(vector_at(start, place), align=4)
                for start in (distances_at, weight_at, reach_at)
            )
            far = builder.fmul(far, factor)
            now = builder.select(builder.fcmp_ordered("<", far, was), far, was)
            builder.store(now, vector_at(reach_at, place), align=4)
            most_yet, best_yet, here = builder.load(top), builder.load(best), builder.load(index)
            more = builder.fcmp_ordered(">", now, most_yet)
            builder.store(builder.select(more, now, most_yet), top)
            builder.store(builder.select(more, here, best_yet), best)
            builder.store(builder.add(here, ir.Constant(whole, [width] * width)), index)
        builder.store(builder.load(top), vector_at(most_at, _LONG(0)), align=4)
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
