"""Greedy k-center on the CPU, with the same picks as `weir.pools.kcenter.farthest_first`.

After each pick, the distances of all remaining keys from the picked key are needed. If a large part
of the keys is picked, all distances are computed in advance, in tiles. A tile has the distances
between the keys of two panels (`vectors`), computed from differences, in float32. Tiles above the
diagonal are computed, and are transposed for those below it. With many keys, all distances would
take too much memory, and with few picks most would be wasted. In these cases, keys are transposed,
so that one dimension of all keys is adjacent in memory, and each pick goes through them once.

Sums run over the dimensions of a key in another order than PyTorch's, so a distance may differ by
roundings. Roofline if all distances are computed: a difference, a product and a sum for each number
of each pair, at the speed of the processor. Otherwise: the keys of a head are read from the
processor's cache at most k times.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once_value, for_range_slice
from torch import Tensor

from weir.kernels.cpu.compilation import compile_kernel
from weir.kernels.cpu.threads import run_on_rows
from weir.kernels.cpu.vectors import (
    INT,
    LONG,
    add_product,
    call_for_each,
    combine,
    constant,
    floats,
    for_lanes,
    lanes,
    llvm_function,
    load_at,
    pack_rows,
    store_at,
    transpose,
)
from weir.kernels.dispatch import ALIKE

_WORTH_A_THREAD = 2**26
"""For fewer differences than this, a separate thread costs more than it saves."""
_BETWEEN = 64
"""Number of picks after which the remaining keys are packed again."""
_TOGETHER = 8
"""Number of dimensions whose squared differences are summed before `square` is written."""
_AT_ONCE = 2**20
"""Largest number of distances in memory, for a head in each thread: 4 MB."""
_SHARE = 5
"""All distances are computed if at least one key in this many is picked. A distance in a tile takes
about a quarter of the time of one that is computed after a pick, but distances between two keys are
computed in vain if neither of the two is picked.
"""


_NEAR_ENOUGH = np.float32(1 - ALIKE)


@njit(nogil=True)
def _first_as_far(reach: np.ndarray, at: int) -> int:
    """Return the first key that is as far as the farthest key, `at`, or nearer only by rounding.

    `reach` has the weighted distance of each key from the nearest picked one; -1 for picked keys
    and for keys that are not candidates.
    """
    enough = reach[at] * _NEAR_ENOUGH
    for place in range(at):
        if reach[place] >= enough:
            return place
    return at


# --- few picks of many keys


def _pick(
    keys: np.ndarray, far: np.ndarray, weight: np.ndarray, wanted: np.ndarray, order: np.ndarray
) -> None:
    heads, dim, slots = keys.shape
    square = np.empty(slots, np.float32)
    places, stays = np.empty(slots, np.int64), np.empty(slots, np.int64)
    for head in range(heads):
        reach, heavy = far[head], weight[head]
        # Floats that are not negative have the same order as their bits read as whole numbers, and
        # numba vectorizes only a maximum of whole numbers.
        bits = reach.view(np.int32)
        left = slots
        for place in range(slots):
            places[place] = place
        for done in range(wanted[head]):
            if done % _BETWEEN == 0:
                # Close the gaps of keys that were picked or are not candidates (both -1), in order.
                count = 0
                for place in range(left):
                    stays[count] = place
                    count += reach[place] >= 0.0
                left = count
                if left == 0:
                    break
                for place in range(left):
                    reach[place] = reach[stays[place]]
                    heavy[place] = heavy[stays[place]]
                    places[place] = places[stays[place]]
                for part in range(dim):
                    line = keys[head, part]
                    for place in range(left):
                        line[place] = line[stays[place]]
            largest = bits[0]
            for place in range(left):
                largest = max(largest, bits[place])
            if largest < 0:
                break
            at = 0
            while bits[at] != largest:
                at += 1
            at = _first_as_far(reach, at)
            order[head, places[at]] = done
            square[:left] = 0.0
            # With eight dimensions at a time, `square` is read and written an eighth as often.
            for part in range(0, dim, _TOGETHER):
                k0, k1 = keys[head, part], keys[head, part + 1]
                k2, k3 = keys[head, part + 2], keys[head, part + 3]
                k4, k5 = keys[head, part + 4], keys[head, part + 5]
                k6, k7 = keys[head, part + 6], keys[head, part + 7]
                c0, c1, c2, c3 = k0[at], k1[at], k2[at], k3[at]
                c4, c5, c6, c7 = k4[at], k5[at], k6[at], k7[at]
                for place in range(left):
                    d0, d1 = k0[place] - c0, k1[place] - c1
                    d2, d3 = k2[place] - c2, k3[place] - c3
                    d4, d5 = k4[place] - c4, k5[place] - c5
                    d6, d7 = k6[place] - c6, k7[place] - c7
                    half = (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
                    square[place] += half + ((d4 * d4 + d5 * d5) + (d6 * d6 + d7 * d7))
            for place in range(left):
                reach[place] = min(reach[place], np.sqrt(square[place]) * heavy[place])
            reach[at] = -1.0


# --- many picks, with all distances computed in advance


@llvm_function
def _measure_tile(
    builder: ir.IRBuilder,
    ours: Any,
    theirs: Any,
    dim: Any,
    out: Any,
    mirrored: Any,
    stride: Any,
    lanes: Any,
) -> None:
    """Compute the distances between the keys of two panels.

    Args:
        builder: builds the code.
        ours, theirs: addresses of panels, float32 [dim, lanes].
        dim: numbers of a key.
        out: address of `out[i, j]`, the distance of ours[:, i] from theirs[:, j].
        mirrored: address of `mirrored[j, i]`, the same distances transposed.
        stride: distance between two lines of `out`, and of `mirrored`, in numbers.
        lanes: 8 or 16.
    """

    def add_square(builder: ir.IRBuilder, total: Any, other: Any, number: Any) -> None:
        apart = builder.fsub(other, number)
        add_product(builder, total, apart, apart)

    def emit(width: int) -> None:
        pointers = floats(builder, theirs), floats(builder, ours)
        squares = combine(builder, *pointers, dim, LONG(width), width, add_square)
        lines = [call_for_each(builder, "sqrt", sums) for sums in squares]
        for start, distances in ((out, lines), (mirrored, transpose(builder, lines))):
            for i, line in enumerate(distances):
                store_at(builder, line, floats(builder, start), builder.mul(stride, LONG(i)))

    for_lanes(builder, lanes, emit)


@llvm_function
def _come_nearer(
    builder: ir.IRBuilder,
    distances: Any,
    weight: Any,
    reach: Any,
    count: Any,
    most: Any,
    where: Any,
    lanes: Any,
) -> None:
    """Compute `reach = min(reach, distances * weight)`, and find the largest.

    Args:
        builder: builds the code.
        distances, weight, reach: addresses of float32 [count].
        count: a multiple of `lanes`.
        most: address of the output, float32 [lanes]: the largest of each lane.
        where: address of the output, int32 [lanes]: its place, or the first place if several are
            equal.
        lanes: 8 or 16.
    """

    def emit(width: int) -> None:
        whole = ir.VectorType(INT, width)
        top = alloca_once_value(builder, constant(-math.inf, width))
        best = alloca_once_value(builder, constant(0, width, INT))
        index = alloca_once_value(builder, ir.Constant(whole, list(range(width))))
        with for_range_slice(builder, LONG(0), count, LONG(width)) as (place, _):
            far, factor, was = (
                load_at(builder, floats(builder, start), place, width)
                for start in (distances, weight, reach)
            )
            far = builder.fmul(far, factor)
            now = builder.select(builder.fcmp_ordered("<", far, was), far, was)
            store_at(builder, now, floats(builder, reach), place)
            most_yet, best_yet, here = builder.load(top), builder.load(best), builder.load(index)
            higher = builder.fcmp_ordered(">", now, most_yet)
            builder.store(builder.select(higher, now, most_yet), top)
            builder.store(builder.select(higher, here, best_yet), best)
            builder.store(builder.add(here, constant(width, width, INT)), index)
        store_at(builder, builder.load(top), floats(builder, most), LONG(0))
        place = builder.inttoptr(where, whole.as_pointer())
        builder.store(builder.load(best), place, align=4)

    for_lanes(builder, lanes, emit)


@njit(nogil=True)
def _measure(keys: np.ndarray, lanes: int, panels: np.ndarray, out: np.ndarray) -> None:
    """Compute the distances between all keys.

    Args:
        keys: float32 [n, dim].
        lanes: 8 or 16.
        panels: memory for the keys [panels, dim * lanes], float32, with enough panels for all of
            them.
        out: the output, float32 [panels * lanes, panels * lanes]; lines and columns without a key
            are undefined.
    """
    for panel in range(len(panels)):
        pack_rows(keys, panel * lanes, lanes, panels[panel])
    stride, size, dim = out.shape[1], 4 * panels.shape[1], keys.shape[1]
    start, square = panels.ctypes.data, out.ctypes.data
    for i in range(len(panels)):
        for j in range(i, len(panels)):
            above = square + 4 * lanes * (i * stride + j)
            below = square + 4 * lanes * (j * stride + i)
            _measure_tile(start + i * size, start + j * size, dim, above, below, stride, lanes)


def _pick_of_pairs(
    keys: np.ndarray,
    far: np.ndarray,
    weight: np.ndarray,
    wanted: np.ndarray,
    order: np.ndarray,
    widest: np.ndarray,
) -> None:
    heads, slots, dim = keys.shape
    lanes = widest[0]
    number = (slots + lanes - 1) // lanes
    panels = np.empty((number, dim * lanes), np.float32)
    distances = np.empty((number * lanes, number * lanes), np.float32)
    reach, heavy = np.empty(number * lanes, np.float32), np.ones(number * lanes, np.float32)
    most, where = np.empty(lanes, np.float32), np.empty(lanes, np.int32)
    to_reach, to_heavy = reach.ctypes.data, heavy.ctypes.data
    to_most, to_where = most.ctypes.data, where.ctypes.data
    for head in range(heads):
        _measure(keys[head], lanes, panels, distances)
        reach[:slots], heavy[:slots] = far[head], weight[head]
        reach[slots:] = -1.0
        largest, at = np.float32(-1.0), 0
        for place in range(slots):
            if reach[place] > largest:
                largest, at = reach[place], place
        for done in range(wanted[head]):
            if largest < 0.0:
                break
            at = _first_as_far(reach, at)
            order[head, at] = done
            reach[at] = -1.0
            line = distances[at].ctypes.data
            _come_nearer(line, to_heavy, to_reach, len(reach), to_most, to_where, lanes)
            largest, at = most[0], int(where[0])
            for lane in range(1, lanes):
                if most[lane] > largest or (most[lane] == largest and where[lane] < at):
                    largest, at = most[lane], int(where[lane])


_compiled_pick, _compiled_pick_of_pairs = compile_kernel(_pick), compile_kernel(_pick_of_pairs)


def farthest_first(keys: Tensor, among: Tensor, k: int, weight: Tensor | None = None) -> Tensor:
    """Return the order in which keys are picked [batch, kv_heads, n], int64; -1 for the others.

    Args:
        keys: [batch, kv_heads, n, key_dim].
        among: the candidates [batch, kv_heads, n], bool.
        k: number of picks for each head; if a head has fewer candidates, all are picked.
        weight: factors of distances [batch, kv_heads, n], float32; None for 1.
    """
    far = torch.where(among, torch.inf, -1.0).float().flatten(0, 1)
    heavy = torch.ones_like(far) if weight is None else weight.flatten(0, 1).float().contiguous()
    order = torch.full(far.shape, -1, dtype=torch.int64, device=far.device)
    if far.numel():
        heads, slots = far.shape
        wanted = np.full(heads, k)
        threads = 1 + k * keys.numel() // _WORTH_A_THREAD
        if slots * slots <= _AT_ONCE and slots <= _SHARE * k:
            lines, pick = keys.float().contiguous().flatten(0, 1), _compiled_pick_of_pairs
            more = [np.full(heads, lanes())]
        else:
            # Zeros do not change distances.
            whole = F.pad(keys.float(), (0, -keys.shape[3] % _TOGETHER)).flatten(0, 1)
            lines, pick = whole.mT.clone(memory_format=torch.contiguous_format), _compiled_pick
            heavy, more = heavy.clone(), []  # overwritten when keys are packed again
        arrays = [t.numpy() for t in (lines, far, heavy, order)]
        run_on_rows(pick, [*arrays[:3], wanted, arrays[3], *more], threads)
    return order.view_as(among)
