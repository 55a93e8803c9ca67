"""Attention of the newest tokens over all slots, themselves among them, on one thread of a CPU.

What a piece of a prompt asks. PyTorch's fused attention adds a mask as large as queries times
slots, though a query sees all slots but the few behind its own. Here 8 or 16 queries of a head are
the lanes of a vector. Their logits over all slots up to the last that one of them sees are made by
tiles, whose sums stay in registers; one pass has their largest, one the exponentials, and the
weighted values are tiles again. No more logits are held than those of these queries, and keys are
packed once for all heads that share them. Sums are float32, in the order of slots.

Roofline: two products and two sums for each number of each key that a query sees, at the pace of
the processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic
from torch import Tensor

from weir.errors import WeirError
from weir.kernels.cpu.compilation import (
    WHOLE,
    Steps,
    address,
    bytes_at,
    compiled,
    floats_at,
    in_lines,
    shorts_at,
)
from weir.kernels.cpu.panels import MATH, multiply, packed, products
from weir.kernels.cpu.vectors import (
    FLOAT,
    INT,
    LONG,
    everywhere,
    lanes,
    of_each,
    turned,
    vector_at,
)
from weir.kernels.dispatch import LEAST_LANES, QuantizedVectors

_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_LEAST = -87.0
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""Cephes', of e^f for f in half an octave of 0."""
Codes = tuple[int, Steps, int, Steps, float]
"""Vectors of 8 bits: `address` of numbers and of peaks, and how many steps make a peak."""


@intrinsic(prefer_literal=True)
def _answer(
    typing: Any,
    x: Any,
    numbers: Any,
    count: Any,
    step: Any,
    share: Any,
    out: Any,
    out_step: Any,
    lanes: Any,
) -> Any:
    """`out[lane, i] = share[lane] * products[i, lane]`; arguments as there, by address."""
    width = lanes.literal_value
    signature = types.void(*[types.uintp] * 7, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        x_at, numbers_at, share_at, out_at = (
            builder.inttoptr(given[i], FLOAT.as_pointer()) for i in (0, 1, 4, 5)
        )
        share = builder.load(vector_at(builder, share_at, LONG(0), width), align=4)
        sums = products(builder, x_at, numbers_at, given[2], given[3], width)
        weighed = [builder.fmul(line, share) for line in sums]
        for i, line in enumerate(turned(builder, weighed)):
            at = vector_at(builder, out_at, builder.mul(given[6], LONG(i)), width)
            builder.store(line, at, align=4)
        return context.get_dummy_value()

    return signature, write


@intrinsic(prefer_literal=True)
def _weigh(
    typing: Any,
    logits: Any,
    mask: Any,
    above: Any,
    below: Any,
    count: Any,
    share: Any,
    apart: Any,
    lanes: Any,
) -> Any:
    """Logits, with a number for each slot added, become exponentials of what they are below the
    largest; the sum of these is the denominator.

    Args:
        typing: of the call; numba's.
        logits: address of float32 [count, lanes], written over.
        mask: address of float32 [count].
        above, below: addresses of float32 [count]: what exponentials are multiplied by, and what
            they count in the denominator.
        count: slots.
        share: address of float32 [lanes], which are written: one over the sum of each lane. 0
            where every logit is -inf, not a number where one is not, or is infinite.
        apart: 1 where these two are read, 0 where they are all 1, a constant.
        lanes: 8 or 16, a constant.
    """
    width = lanes.literal_value
    vector, whole = ir.VectorType(FLOAT, width), ir.VectorType(INT, width)
    signature = types.void(*[types.uintp] * 6, apart, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        logits_at, mask_at, above_at, below_at, share_at = (
            builder.inttoptr(given[i], FLOAT.as_pointer()) for i in (0, 1, 2, 3, 5)
        )
        count = given[4]

        def of_slot(numbers: Any, place: Any) -> Any:
            return everywhere(builder, builder.load(builder.gep(numbers, [place])), width)

        def of(number: float) -> Any:
            return ir.Constant(vector, [number] * width)

        def times_plus(x: Any, factor: Any, term: Any) -> Any:
            product = builder.fmul(x, factor, flags=MATH)
            return builder.fadd(product, term, flags=MATH)

        def at(place: Any) -> Any:
            return vector_at(builder, logits_at, builder.mul(place, LONG(width)), width)

        highest, total = (alloca_once_value(builder, of(0.0)) for _ in range(2))
        builder.store(of(-math.inf), highest)
        builder.store(of(0.0), total)
        with for_range(builder, count) as loop:
            more = of_slot(mask_at, loop.index)
            logit = builder.fadd(builder.load(at(loop.index), align=4), more)
            builder.store(logit, at(loop.index), align=4)
            yet = builder.load(highest)
            builder.store(
                builder.select(builder.fcmp_ordered(">", logit, yet), logit, yet), highest
            )
            builder.store(builder.fadd(builder.load(total), logit), total)
        top, added = builder.load(highest), builder.load(total)
        wrong = builder.or_(
            builder.fcmp_ordered("==", top, of(math.inf)),
            builder.fcmp_unordered("uno", added, added),
        )
        top = builder.select(builder.fcmp_ordered("==", top, of(-math.inf)), of(0.0), top)
        builder.store(of(0.0), total)
        with for_range(builder, count) as loop:
            # e^x = 2^n e^f, with f in half an octave of 0.
            x = builder.fsub(builder.load(at(loop.index), align=4), top)
            counts = builder.fcmp_ordered(">", x, of(_LEAST))
            x = builder.select(counts, x, of(_LEAST))
            n = of_each(builder, "floor", times_plus(x, of(_LOG2E), of(0.5)))
            f = times_plus(n, of(-_LN2_LOW), times_plus(n, of(-_LN2_HIGH), x))
            p = of(_POLYNOMIAL[0])
            for factor in _POLYNOMIAL[1:]:
                p = times_plus(p, f, of(factor))
            p = builder.fadd(times_plus(builder.fmul(p, f), f, f), of(1.0))
            power = builder.add(builder.fptosi(n, whole), ir.Constant(whole, [127] * width))
            power = builder.shl(power, ir.Constant(whole, [23] * width))
            p = builder.fmul(p, builder.bitcast(power, vector))
            p = builder.select(counts, p, of(0.0))
            if apart.literal_value:
                counted = builder.fmul(p, of_slot(below_at, loop.index))
                p = builder.fmul(p, of_slot(above_at, loop.index))
            else:
                counted = p
            builder.store(p, at(loop.index), align=4)
            builder.store(builder.fadd(builder.load(total), counted), total)
        added = builder.load(total)
        share = builder.fdiv(of(1.0), added)
        share = builder.select(builder.fcmp_ordered("==", added, of(0.0)), of(0.0), share)
        share = builder.select(wrong, of(math.nan), share)
        builder.store(share, vector_at(builder, share_at, LONG(0), width), align=4)
        return context.get_dummy_value()

    return signature, write


@njit(nogil=True)
def _widened(
    numbers_at: int,
    steps: Steps,
    peaks_at: int,
    peak_steps: Steps,
    levels: float,
    row: int,
    head: int,
    bits: np.ndarray,
    out: np.ndarray,
) -> None:
    """Vectors of 8 bits of a head into `out` [n, dim], as many as it holds; `bits` is room for a
    number.
    """
    numbers, peaks = bytes_at(numbers_at, WHOLE)[0], shorts_at(peaks_at, WHOLE)[0]
    at = row * steps[0] + head * steps[1]
    top = row * peak_steps[0] + head * peak_steps[1]
    count, dim, most = out.shape[0], out.shape[1], np.float32(levels)
    for place in range(count):
        # A bfloat16 is the upper half of a float32.
        bits[0] = np.int32(peaks[top + place * peak_steps[2]]) << 16
        step = bits.view(np.float32)[0] / most
        start = at + place * steps[2]
        codes, vector = numbers[start : start + dim], out[place]
        for i in range(dim):
            vector[i] = np.float32(codes[i]) * step


@njit(nogil=True)
def _copied(lines: np.ndarray, at: int, step: int, out: np.ndarray) -> None:
    """Lines from place `at` on into `out` [n, dim]."""
    count, dim = out.shape
    for place in range(count):
        start = at + place * step
        line, vector = lines[start : start + dim], out[place]
        for i in range(dim):
            vector[i] = line[i]


@intrinsic(prefer_literal=True)
def _add(typing: Any, weights: Any, share: Any, count: Any, out: Any, lanes: Any) -> Any:
    """Add the shares of some queries' attention, `weights[slot, lane] * share[lane]`, to `out`.

    Args:
        typing: of the call; numba's.
        weights, out: addresses of float32 [count, lanes].
        share: address of float32 [lanes].
        count: slots.
        lanes: 8 or 16, a constant.
    """
    width = lanes.literal_value
    signature = types.void(*[types.uintp] * 4, lanes)

    def write(context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        weights_at, share_at, out_at = (
            builder.inttoptr(given[i], FLOAT.as_pointer()) for i in (0, 1, 3)
        )
        share = builder.load(vector_at(builder, share_at, LONG(0), width), align=4)
        with for_range(builder, given[2]) as loop:
            place = builder.mul(loop.index, LONG(width))
            weight, total = (
                vector_at(builder, numbers, place, width) for numbers in (weights_at, out_at)
            )
            product = builder.fmul(builder.load(weight, align=4), share, flags=MATH)
            product = builder.fadd(builder.load(total, align=4), product, flags=MATH)
            builder.store(product, total, align=4)
        return context.get_dummy_value()

    return signature, write


def _attend(
    queries_at: int,
    query_steps: Steps,
    keys_at: int,
    key_steps: Steps,
    values_at: int,
    value_steps: Steps,
    mask_at: int,
    above_at: int,
    below_at: int,
    mask_steps: Steps,
    key_codes: Codes,
    value_codes: Codes,
    coded: int,
    scale: float,
    widest: int,
    dim: int,
    slots: int,
    out: np.ndarray,
    received: np.ndarray,
) -> None:
    """Answers [batch, heads, group, length, value_dim] into `out`, and where that has any place
    what slots received into `received` [batch, heads, length / widest, slots]; see `causal`.
    """
    batch, heads, group, length, width = out.shape
    apart, counted = above_at != 0, received.shape[2] > 0
    queries, keys = floats_at(queries_at, WHOLE)[0], floats_at(keys_at, WHOLE)[0]
    values = floats_at(values_at, WHOLE)[0]
    panels = np.empty(((slots + widest - 1) // widest, dim * widest), np.float32)
    asked = np.empty(dim * widest, np.float32)
    logits = np.empty((len(panels) * widest, widest), np.float32)
    totals = np.empty((slots if counted else 0, widest), np.float32)
    share, none = np.empty(widest, np.float32), np.zeros(slots, np.float32)
    # Where slots are quantized, those of a head are read before it is asked; otherwise the last few
    # keys, which are no panel.
    whole = 0 if coded else slots // widest
    read_keys = np.zeros(((len(panels) - whole) * widest, dim), np.float32)
    read_values = np.empty((slots if coded else 0, width), np.float32)
    bits = np.empty(1, np.int32)
    to_asked, to_logits, to_share = asked.ctypes.data, logits.ctypes.data, share.ctypes.data
    to_totals = totals.ctypes.data
    for both in range(batch * heads):
        row, head = both // heads, both % heads
        at = row * key_steps[0] + head * key_steps[1]
        value_at = row * value_steps[0] + head * value_steps[1]
        for panel in range(whole):
            first = at + panel * widest * key_steps[2]
            packed(keys, first, key_steps[2], dim, 1.0, widest, panels[panel])
        alone = slots - coded - whole * widest
        first = at + whole * widest * key_steps[2]
        _copied(keys, first, key_steps[2], read_keys[coded : coded + alone])
        if coded:
            _widened(*key_codes, row, head, bits, read_keys[:coded])
            _widened(*value_codes, row, head, bits, read_values[:coded])
            _copied(values, value_at, value_steps[2], read_values[coded:])
        lines = read_keys.reshape(-1)
        for panel in range(whole, len(panels)):
            first = (panel - whole) * widest * dim
            packed(lines, first, dim, dim, 1.0, widest, panels[panel])
        to_values, value_step = values[value_at:].ctypes.data, value_steps[2]
        if coded:
            to_values, value_step = read_values.ctypes.data, width
        weight = 4 * (row * mask_steps[0] + head * mask_steps[1])
        to_mask = mask_at + weight if mask_at else none.ctypes.data
        to_above = above_at + weight if apart else none.ctypes.data
        to_below = below_at + weight if apart else none.ctypes.data
        at = row * query_steps[0] + head * query_steps[1]
        for begin in range(0, length, widest):
            # The last few, where they are no vector, are asked with some before them again.
            start = min(begin, length - widest)
            # The first of these queries sees the slots up to this one, each next one more.
            own = slots - length + start
            seen = own + widest
            totals[:] = np.float32(0.0)
            for member in range(group):
                first = at + member * query_steps[2] + start * query_steps[3]
                packed(queries, first, query_steps[3], dim, scale, widest, asked)
                for panel in range((seen + widest - 1) // widest):
                    to = to_logits + 4 * widest * widest * panel
                    number = panels[panel].ctypes.data
                    if widest == 16:
                        multiply(to_asked, number, dim, 16, to, 16)
                    else:
                        multiply(to_asked, number, dim, 8, to, 8)
                for ahead in range(1, widest):
                    for lane in range(ahead):
                        logits[own + ahead, lane] = -np.inf
                if widest == 16 and apart:
                    _weigh(to_logits, to_mask, to_above, to_below, seen, to_share, 1, 16)
                elif widest == 16:
                    _weigh(to_logits, to_mask, to_above, to_below, seen, to_share, 0, 16)
                elif apart:
                    _weigh(to_logits, to_mask, to_above, to_below, seen, to_share, 1, 8)
                else:
                    _weigh(to_logits, to_mask, to_above, to_below, seen, to_share, 0, 8)
                answers = out[row, head, member, start].ctypes.data
                for part in range(0, width, widest):
                    place = 4 * min(part, width - widest)
                    number, to = to_values + place, answers + place
                    if widest == 16:
                        _answer(to_logits, number, seen, value_step, to_share, to, width, 16)
                    else:
                        _answer(to_logits, number, seen, value_step, to_share, to, width, 8)
                if counted and widest == 16:
                    _add(to_logits, to_share, seen, to_totals, 16)
                elif counted:
                    _add(to_logits, to_share, seen, to_totals, 8)
            if counted:
                place = received[row, head, begin // widest]
                for slot in range(slots):
                    place[slot] = totals[slot].sum()


_run = compiled(_attend)
_NO_CODES = 0, (0, 0, 0), 0, (0, 0, 0), 1.0


def causal(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    factors: tuple[Tensor, Tensor] | None = None,
    coded: tuple[QuantizedVectors, QuantizedVectors] | None = None,
) -> Tensor:
    """The answers [batch, kv_heads, group, length, value_dim]; zero for a query that sees nothing.

    Args:
        queries: of the tokens of the last `length` slots, in their order
            [batch, kv_heads, group, length, key_dim], float32; 16 or more.
        keys, values: of exact slots [batch, kv_heads, exact, dim], float32; values of 16 numbers or
            more.
        mask: log-weights of slots, the same in both sums [batch, kv_heads, slots], float32; None
            where all are 0.
        scale: factor of the logits.
        factors: of slots in the numerator and in the denominator, beside the mask, as
            `weir.slab.attention.split_weights` has them; None where all are 1.
        coded: of the keys and of the values of quantized slots in front of the exact ones their
            numbers [batch, kv_heads, coded, dim], int8, the peaks of each
            [batch, kv_heads, coded, 1], bfloat16, and how many steps make a peak.

    Raises:
        WeirError: there are fewer queries or numbers of a value, or fewer slots than queries: it
            would write past its memory.
    """
    return _answered(queries, keys, values, mask, scale, factors, coded, counted=False)[0]


def causal_and_received(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    coded: tuple[QuantizedVectors, QuantizedVectors] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """`causal`, and what slots received: of the attention of some queries in a row, and of all
    heads of the group together, the share of each slot [batch, kv_heads, parts, slots], float32.

    The parts of the queries are equally many, 16 each or 8. None where there are no such parts.

    Raises:
        WeirError: as `causal`.
    """
    if queries.shape[3] % lanes():
        return None
    return _answered(queries, keys, values, mask, scale, None, coded, counted=True)


def _answered(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    factors: tuple[Tensor, Tensor] | None,
    coded: tuple[QuantizedVectors, QuantizedVectors] | None,
    *,
    counted: bool,
) -> tuple[Tensor, Tensor]:
    """Both; the second is empty where that is not asked for."""
    if min(queries.shape[3], values.shape[3]) < LEAST_LANES:
        raise WeirError(
            f"this kernel takes {LEAST_LANES} queries and values of {LEAST_LANES} numbers at "
            f"least, not {queries.shape[3]} and {values.shape[3]}"
        )
    count = 0 if coded is None else coded[0][0].shape[2]
    slots, width = count + keys.shape[2], lanes()
    if slots < queries.shape[3]:
        raise WeirError(
            f"{queries.shape[3]} queries are asked of {slots} slots; those of the last slots are, "
            "so there is a slot for each"
        )
    out = queries.new_empty((*queries.shape[:4], values.shape[3]))
    parts = queries.shape[3] // width if counted else 0
    received = queries.new_empty((*queries.shape[:2], parts, slots))
    queries, keys, values = map(in_lines, (queries, keys, values))
    of_slots = (mask, *(factors or (None, None)))
    weights = [None if t is None else t.contiguous() for t in of_slots]
    where = [0 if t is None else t.data_ptr() for t in weights]
    steps = next((t.stride()[:2] for t in weights if t is not None), (0, 0))
    codes = [_NO_CODES, _NO_CODES] if coded is None else list(map(_in_lines, coded))
    given = *address(queries), *address(keys), *address(values), *where, steps
    numbers = count, scale, width, keys.shape[3], slots
    _run(*given, *codes, *numbers, out.numpy(), received.numpy())
    return out, received


def _in_lines(stored: QuantizedVectors) -> Codes:
    """As the kernel has them: buffers of quantized slots lie in lines."""
    numbers, peaks, levels = stored
    return *address(numbers), *address(peaks), float(levels)
