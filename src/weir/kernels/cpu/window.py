"""Attention of a piece of a prompt over a window that moves while the piece is read.

A piece is cut into chunks, and after each chunk the window drops its oldest tokens. A chunk sees
three stretches of slots: the front, with keys rotated for this chunk; tokens that are already
quantized when the chunk is read; and exact tokens, up to the query's own. Tokens that are quantized
while the piece is read are passed twice, exact and as they are read after quantization, so that
one call can compute a whole piece.

Queries are the lanes of vectors, two vectors at a time. Logits and answers are computed in *tiles*:
each number of a key or value that is loaded is multiplied with both vectors. The logits of 12
keys, or 12 numbers of the answers (6 if vectors have 8 lanes), are summed in registers. Sums are
float32, in the order of slots.

Roofline: two products and two sums for each number of each key that a query sees, at the speed of
the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once_value, for_range
from torch import Tensor

from weir.errors import WeirError
from weir.kernels.cpu.causal import weigh
from weir.kernels.cpu.compilation import floats_at, keep, longs_at, records_at
from weir.kernels.cpu.threads import TeamKernel, take_part, threads_for
from weir.kernels.cpu.vectors import (
    LONG,
    add_product,
    broadcast,
    constant,
    floats,
    for_lanes,
    lanes,
    llvm_function,
    load_at,
    pack,
    store_at,
    switch,
    transpose,
)
from weir.kernels.dispatch import LEAST_LANES
from weir.kernels.signatures import WindowChunk

_VECTORS = 2
"""Number of vectors of queries that are multiplied at once."""
_OF_8, _OF_16 = (6, 2, 1), (12, 4, 1)
"""Numbers of sums for each vector in a tile, for vectors of 8 and 16 lanes: as many as fit in
registers, and fewer for the remainder.
"""
_WORTH_A_THREAD = 2**20
"""For fewer products than this, a separate thread costs more than it saves."""
_PIECE = np.dtype(
    [(name, np.int64) for name in ("taken", "parts", "batch", "heads", "group", "length")]
    + [(name, np.int64) for name in ("dim", "width", "lanes", "exact", "coded", "fronts")]
    + [(name, np.int64) for name in ("queries", "keys", "values", "coded_keys", "coded_values")]
    + [(name, np.int64) for name in ("front_keys", "front_values", "out", "chunks", "count")]
    + [("scale", np.float64)]
)
_CHUNK = np.dtype([(name, np.int64) for name in WindowChunk._fields])
_piece_at, _chunks_at = records_at(_PIECE), records_at(_CHUNK)


# --- tiles


@llvm_function
def _tile(
    builder: ir.IRBuilder,
    x: Any,
    x_apart: Any,
    numbers: Any,
    across: Any,
    along: Any,
    count: Any,
    out: Any,
    out_apart: Any,
    height: Any,
    more: Any,
    lanes: Any,
) -> None:
    """Compute `out[v, i] (+)= sum over j of x[v, j] * numbers[i * across + j * along]`, for both
    vectors v.

    Args:
        builder: builds the code.
        x: address of the factors for the first vector of queries, float32 [count, lanes].
        x_apart: distance from there to the factors for the second vector, in numbers.
        numbers: address of the keys or values, float32.
        across, along: see the formula.
        count: number of terms in a sum.
        out: address of the sums for the first vector of queries, float32 [height, lanes].
        out_apart: distance from there to the sums for the second vector, in numbers.
        height: the number of sums for each vector, one of those in `_OF_8` or `_OF_16`.
        more: 1 to add to the existing numbers, 0 to overwrite them.
        lanes: 8 or 16.
    """

    def emit(width: int, sums: int) -> None:
        given, taken, found = (floats(builder, at) for at in (x, numbers, out))
        adds, nothing = builder.icmp_unsigned("!=", more, LONG(0)), constant(0.0, width)
        total: list[list[tuple[Any, Any]]] = []  # for each vector, its sums and their places
        for v in range(_VECTORS):
            start = builder.mul(out_apart, LONG(v))
            places = [builder.add(start, LONG(i * width)) for i in range(sums)]
            total.append([(alloca_once_value(builder, nothing), place) for place in places])
            for each, place in total[v]:
                there = load_at(builder, found, place, width)
                builder.store(builder.select(adds, there, nothing), each)
        lines = [builder.gep(taken, [builder.mul(across, LONG(i))]) for i in range(sums)]
        with for_range(builder, count) as loop:
            at = builder.mul(loop.index, LONG(width))
            apart = [builder.mul(x_apart, LONG(v)) for v in range(_VECTORS)]
            pair = [load_at(builder, given, builder.add(at, far), width) for far in apart]
            step = builder.mul(loop.index, along)
            for i, line in enumerate(lines):
                number = broadcast(builder, builder.load(builder.gep(line, [step])), width)
                for v in range(_VECTORS):
                    add_product(builder, total[v][i][0], pair[v], number)
        for each, place in (pair for pairs in total for pair in pairs):
            store_at(builder, builder.load(each), found, place)

    for_lanes(
        builder,
        lanes,
        lambda width: switch(
            builder, height, _OF_16 if width == 16 else _OF_8, lambda sums: emit(width, sums)
        ),
    )


@llvm_function
def _turn(builder: ir.IRBuilder, sums: Any, share: Any, out: Any, step: Any, lanes: Any) -> None:
    """Compute `out[lane * step + i] = sums[i, lane] * share[lane]` for all i below `lanes`. `sums`,
    `share` and `out` are addresses of float32 numbers.
    """

    def emit(width: int) -> None:
        factor = load_at(builder, floats(builder, share), LONG(0), width)
        read = (
            load_at(builder, floats(builder, sums), LONG(i * width), width) for i in range(width)
        )
        for i, line in enumerate(transpose(builder, [builder.fmul(x, factor) for x in read])):
            store_at(builder, line, floats(builder, out), builder.mul(step, LONG(i)))

    for_lanes(builder, lanes, emit)


@njit(nogil=True)
def _tiles(
    x: int,
    x_apart: int,
    numbers: int,
    across: int,
    along: int,
    count: int,
    out: int,
    out_apart: int,
    rows: int,
    more: int,
    lanes: int,
) -> None:
    """Do the same as `_tile` for any number of sums."""
    row = 0
    for height in _OF_16 if lanes == 16 else _OF_8:
        while rows - row >= height:
            number, to = numbers + 4 * row * across, out + 4 * row * lanes
            _tile(x, x_apart, number, across, along, count, to, out_apart, height, more, lanes)
            row += height


# --- a chunk of a head


@njit(nogil=True)
def _attend(n: np.record, part: int) -> None:
    """Answer the queries of one chunk of one KV head."""
    units, width, dim, lanes = n.batch * n.heads, n.width, n.dim, n.lanes
    # The last chunks are computed first. They see the most tokens, and if one of them began last,
    # all other threads would have to wait for it.
    index, unit = n.count - 1 - part // units, part % units
    c = _chunks_at(n.chunks, (1, n.count))[0, index]
    front = unit * n.count + index
    coded, exact = unit * n.coded + c.start, unit * n.exact + c.boundary
    counts = np.array([c.front, c.boundary - c.start, 0])
    keys = np.array(
        [
            n.front_keys + 4 * dim * n.fronts * front,
            n.coded_keys + 4 * dim * coded,
            n.keys + 4 * dim * exact,
        ]
    )
    values = np.array(
        [
            n.front_values + 4 * width * n.fronts * unit,
            n.coded_values + 4 * width * coded,
            n.values + 4 * width * exact,
        ]
    )
    before, both = c.front + c.own - c.start, _VECTORS * lanes
    size = before + c.queries
    lines, asked = np.zeros((both, dim), np.float32), np.empty((_VECTORS, dim * lanes), np.float32)
    logits, none = np.empty((_VECTORS, size, lanes), np.float32), np.zeros(size, np.float32)
    sums, share = np.empty((_VECTORS, width, lanes), np.float32), np.empty(both, np.float32)
    answers = np.empty((both, width), np.float32)
    flat, to_none, to_share = lines.reshape(-1), none.ctypes.data, share.ctypes.data
    x, shares, found = asked.ctypes.data, logits.ctypes.data, sums.ctypes.data
    for member in range(n.group):
        head = (unit * n.group + member) * n.length + c.first
        given = floats_at(n.queries + 4 * dim * head, (c.queries, dim))
        out = floats_at(n.out + 4 * width * head, (c.queries, width))
        for begin in range(0, c.queries, both):
            some = min(both, c.queries - begin)
            lines[:some] = given[begin : begin + some]
            for v in range(_VECTORS):
                pack(flat, v * lanes * dim, dim, dim, n.scale, lanes, asked[v])
            seen = before + begin + some
            counts[2] = seen - counts[0] - counts[1]
            place = 0
            for stretch in range(3):
                to, count = shares + 4 * place * lanes, counts[stretch]
                rows = keys[stretch], dim, 1, dim
                _tiles(x, dim * lanes, *rows, to, size * lanes, count, 0, lanes)
                place += count
            for ahead in range(1, some):
                for lane in range(ahead):
                    logits[lane // lanes, seen - some + ahead, lane % lanes] = -np.inf
            for v in range(_VECTORS):
                to = shares + 4 * v * size * lanes
                weigh(to, to_none, to_none, to_none, seen, to_share + 4 * v * lanes, 0, lanes)
            place = 0
            for stretch in range(3):
                weights, count = shares + 4 * place * lanes, counts[stretch]
                columns = values[stretch], 1, width, count
                more = min(place, 1)
                _tiles(weights, size * lanes, *columns, found, width * lanes, width, more, lanes)
                place += count
            for v in range(_VECTORS):
                for column in range(0, width, lanes):
                    first = min(column, width - lanes)
                    square = found + 4 * lanes * (v * width + first)
                    to = answers.ctypes.data + 4 * (v * lanes * width + first)
                    _turn(square, to_share + 4 * v * lanes, to, width, lanes)
            out[begin : begin + some] = answers[:some]
    keep(none)
    keep(share)
    keep(sums)


def _attend_parts(address: int) -> None:
    """Compute chunks of heads one after the other; threads share them."""
    at = longs_at(address, (1, 3))[0, 2]
    n = _piece_at(at, (1, 1))[0, 0]
    part = take_part(at)
    while part < n.parts:
        _attend(n, part)
        part = take_part(at)


_attend_together = TeamKernel(_attend_parts)


def attend_window(
    queries: Tensor,
    exact: tuple[Tensor, Tensor],
    coded: tuple[Tensor, Tensor],
    front: tuple[Tensor, Tensor],
    chunks: Sequence[WindowChunk],
    scale: float,
) -> Tensor:
    """Compute answers [batch, kv_heads, group, length, value_dim], float32.

    Args:
        queries: the queries of a piece [batch, kv_heads, group, length, key_dim], float32 or
            bfloat16.
        exact: keys and values of the tokens that any of these queries sees, except the front, in
            the order of the stream [batch, kv_heads, tokens, dim]; the piece's own come last.
        coded: keys and values of the oldest tokens of `exact`, as they are read after quantization
            [batch, kv_heads, coded, dim].
        front: keys of the front as each chunk sees them [batch, kv_heads, chunks, front, dim], and
            values of the front [batch, kv_heads, front, dim].
        chunks: describe what the queries see, in order.
        scale: factor of the logits.

    Raises:
        WeirError: values have too few numbers, the chunks do not have as many queries as the
            piece, or a chunk sees tokens that do not exist. The kernel would then read or write
            past its memory.
    """
    batch, heads, group, length, dim = queries.shape
    width, tokens = exact[1].shape[3], exact[0].shape[2]
    fits, place = width >= LEAST_LANES, 0
    for c in chunks:
        fits &= c.first == place and c.queries >= 0
        place += c.queries
        fits &= c.front <= front[1].shape[2] and 0 <= c.start <= c.boundary <= c.own
        fits &= c.boundary <= coded[0].shape[2] or c.boundary == c.start
        fits &= c.own + c.queries <= tokens
    if not fits or place != length:
        raise WeirError(
            "chunks must cover the piece in order and be within memory, and values must have at "
            "least 16 numbers"
        )
    held = [t.float().contiguous() for t in (queries, *exact, *coded, *front)]
    out = held[0].new_empty((batch, heads, group, length, width))
    table, parts = np.array(chunks, _CHUNK), len(chunks) * batch * heads
    addresses = [t.data_ptr() for t in (*held, out)]
    sizes = batch, heads, group, length, dim, width, lanes()
    counts = tokens, coded[0].shape[2], front[1].shape[2]
    numbers = 0, parts, *sizes, *counts, *addresses, table.ctypes.data, len(chunks), scale
    piece = np.array([numbers], _PIECE)
    work = (
        sum(c.queries * (c.front + c.own - c.start) for c in chunks) * batch * heads * group * dim
    )
    _attend_together(threads_for(work, _WORTH_A_THREAD), piece.ctypes.data)
    return out
