"""Attention of the newest tokens over all slots, including their own, on a CPU.

A piece of a prompt needs this attention. PyTorch's fused attention adds a mask as large as queries
times slots, although a query sees all slots except the few after its own. Here, 8 or 16 queries of
a head are the lanes of a vector. Their logits over all slots up to the last that one of them sees
are computed by tiles, whose sums stay in registers. One pass finds their largest, one computes the
exponentials, and the weighted values are computed by tiles again. Only the logits of these queries
are in memory, and keys are packed once for all heads that share them. Sums are float32, in the
order of slots.

Roofline: a product and a sum for each number of each key and value that a query sees, at the speed
of the processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core.cgutils import alloca_once_value, for_range
from torch import Tensor

from weir.errors import WeirError
from weir.kernels.cpu.compilation import (
    WHOLE,
    Strides,
    address_of,
    compile_kernel,
    floats_at,
    keep,
    with_unit_stride,
)
from weir.kernels.cpu.slot_codec import read_head
from weir.kernels.cpu.softmax import LEAST, LN2_HIGH, LN2_LOW, LOG2E, POLYNOMIAL
from weir.kernels.cpu.threads import run_in_threads
from weir.kernels.cpu.vectors import (
    INT,
    LONG,
    broadcast,
    call_for_each,
    combine,
    constant,
    floats,
    for_lanes,
    lanes,
    llvm_function,
    load_at,
    multiply,
    multiply_add,
    pack,
    store_at,
    switch,
    transpose,
)
from weir.kernels.dispatch import LEAST_LANES
from weir.kernels.signatures import QuantizedVectors

Codes = tuple[int, Strides, int, Strides, float]
"""Vectors of 8 bits: `address_of` their numbers, `address_of` their peaks (the largest absolute
number of each vector), and the number of quantization steps in a peak.
"""


@llvm_function
def _answer(
    builder: ir.IRBuilder,
    x: Any,
    numbers: Any,
    count: Any,
    step: Any,
    share: Any,
    out: Any,
    out_step: Any,
    lanes: Any,
) -> None:
    """Compute `out[lane, i] = share[lane] * combine(x, numbers, count, step)[i, lane]`; arrays are
    given by their addresses.
    """

    def emit(width: int) -> None:
        factor = load_at(builder, floats(builder, share), LONG(0), width)
        pointers = floats(builder, x), floats(builder, numbers)
        sums = combine(builder, *pointers, count, step, width)
        for i, line in enumerate(transpose(builder, [builder.fmul(s, factor) for s in sums])):
            store_at(builder, line, floats(builder, out), builder.mul(out_step, LONG(i)))

    for_lanes(builder, lanes, emit)


@llvm_function
def weigh(
    builder: ir.IRBuilder,
    logits: Any,
    mask: Any,
    above: Any,
    below: Any,
    count: Any,
    share: Any,
    apart: Any,
    lanes: Any,
) -> None:
    """Add `mask` to logits, and replace each sum by `above * e^(sum - largest sum)`.

    Args:
        builder: builds the code.
        logits: address of float32 [count, lanes], which are overwritten.
        mask: address of float32 [count]: for each slot, the number that is added to its logits.
        above, below: addresses of float32 [count], the factors of an exponential in the numerator
            and in the denominator.
        count: number of slots.
        share: address of the output, float32 [lanes]: one over the denominator of each lane, which
            is the sum of `below * e^(sum - largest sum)`. 0 if the denominator is 0, for example
            because every logit is -inf, and NaN if a logit is NaN or +inf.
        apart: 1 if `above` and `below` are read, 0 if they are all 1.
        lanes: 8 or 16.
    """

    def emit(width: int, factors: bool) -> None:
        exponents = floats(builder, logits)

        def of_slot(numbers: Any, place: Any) -> Any:
            number = builder.load(builder.gep(floats(builder, numbers), [place]))
            return broadcast(builder, number, width)

        def of(number: float) -> Any:
            return constant(number, width)

        highest = alloca_once_value(builder, of(-math.inf))
        total = alloca_once_value(builder, of(0.0))
        with for_range(builder, count) as loop:
            place = builder.mul(loop.index, LONG(width))
            read = load_at(builder, exponents, place, width)
            logit = builder.fadd(read, of_slot(mask, loop.index))
            store_at(builder, logit, exponents, place)
            yet = builder.load(highest)
            higher = builder.select(builder.fcmp_ordered(">", logit, yet), logit, yet)
            builder.store(higher, highest)
            builder.store(builder.fadd(builder.load(total), logit), total)
        top, added = builder.load(highest), builder.load(total)
        wrong = builder.or_(
            builder.fcmp_ordered("==", top, of(math.inf)),
            builder.fcmp_unordered("uno", added, added),
        )
        top = builder.select(builder.fcmp_ordered("==", top, of(-math.inf)), of(0.0), top)
        builder.store(of(0.0), total)
        with for_range(builder, count) as loop:
            place = builder.mul(loop.index, LONG(width))
            x = builder.fsub(load_at(builder, exponents, place, width), top)
            counts = builder.fcmp_ordered(">", x, of(LEAST))
            p = _exponential(builder, builder.select(counts, x, of(LEAST)))
            counted = p = builder.select(counts, p, of(0.0))
            if factors:
                counted = builder.fmul(p, of_slot(below, loop.index))
                p = builder.fmul(p, of_slot(above, loop.index))
            store_at(builder, p, exponents, place)
            builder.store(builder.fadd(builder.load(total), counted), total)
        added = builder.load(total)
        factor = builder.fdiv(of(1.0), added)
        factor = builder.select(builder.fcmp_ordered("==", added, of(0.0)), of(0.0), factor)
        factor = builder.select(wrong, of(math.nan), factor)
        store_at(builder, factor, floats(builder, share), LONG(0))

    for_lanes(
        builder,
        lanes,
        lambda width: switch(builder, apart, (0, 1), lambda read: emit(width, bool(read))),
    )


def _exponential(builder: ir.IRBuilder, x: Any) -> Any:
    """Compute e^x = 2^n e^f of each number, with f between -ln(2) / 2 and ln(2) / 2."""
    width = x.type.count

    def of(number: float) -> Any:
        return constant(number, width)

    n = call_for_each(builder, "floor", multiply_add(builder, x, of(LOG2E), of(0.5)))
    f = multiply_add(builder, n, of(-LN2_HIGH), x)
    f = multiply_add(builder, n, of(-LN2_LOW), f)
    p = of(POLYNOMIAL[0])
    for factor in POLYNOMIAL[1:]:
        p = multiply_add(builder, p, f, of(factor))
    p = builder.fadd(multiply_add(builder, builder.fmul(p, f), f, f), of(1.0))
    power = builder.fptosi(n, ir.VectorType(INT, width))
    power = builder.add(power, constant(127, width, INT))
    power = builder.shl(power, constant(23, width, INT))
    return builder.fmul(p, builder.bitcast(power, x.type))


@llvm_function
def _add(builder: ir.IRBuilder, weights: Any, share: Any, count: Any, out: Any, lanes: Any) -> None:
    """Add the shares of some queries' attention, `weights[slot, lane] * share[lane]`, to `out`.

    Args:
        builder: builds the code.
        weights, out: addresses of float32 [count, lanes].
        share: address of float32 [lanes].
        count: number of slots.
        lanes: 8 or 16.
    """

    def emit(width: int) -> None:
        factor = load_at(builder, floats(builder, share), LONG(0), width)
        with for_range(builder, count) as loop:
            place = builder.mul(loop.index, LONG(width))
            weight, total = (
                load_at(builder, floats(builder, numbers), place, width)
                for numbers in (weights, out)
            )
            sums = multiply_add(builder, weight, factor, total)
            store_at(builder, sums, floats(builder, out), place)

    for_lanes(builder, lanes, emit)


@njit(nogil=True)
def _copy(lines: np.ndarray, at: int, step: int, out: np.ndarray) -> None:
    """Copy lines from place `at` on, which are `step` numbers apart, into `out` [n, dim]."""
    count, dim = out.shape
    for place in range(count):
        start = at + place * step
        line, vector = lines[start : start + dim], out[place]
        for i in range(dim):
            vector[i] = line[i]


def _attend(
    queries_at: int,
    query_steps: Strides,
    keys_at: int,
    key_steps: Strides,
    values_at: int,
    value_steps: Strides,
    mask_at: int,
    above_at: int,
    below_at: int,
    mask_steps: Strides,
    key_codes: Codes,
    value_codes: Codes,
    coded: int,
    scale: float,
    lanes: int,
    dim: int,
    slots: int,
    out: np.ndarray,
    received: np.ndarray,
    begun: int,
    done: int,
) -> None:
    """Write answers [batch, heads, group, length, value_dim] into `out`. If `received` [batch,
    heads, length / lanes, slots] is not empty, also write the attention that slots received into
    it; see `causal_and_received`.

    This computes the blocks from `begun` up to `done`, of `lanes` queries each, counted over all
    heads of all rows.
    """
    _, heads, group, length, width = out.shape
    apart, counted = 1 if above_at else 0, received.shape[2] > 0
    queries, keys = floats_at(queries_at, WHOLE)[0], floats_at(keys_at, WHOLE)[0]
    values = floats_at(values_at, WHOLE)[0]
    panels = np.empty(((slots + lanes - 1) // lanes, dim * lanes), np.float32)
    asked = np.empty(dim * lanes, np.float32)
    logits = np.empty((len(panels) * lanes, lanes), np.float32)
    totals = np.empty((slots if counted else 0, lanes), np.float32)
    share, none = np.empty(lanes, np.float32), np.zeros(slots, np.float32)
    # If some slots are quantized, all slots of a head are first copied as float32. Otherwise, only
    # the last few keys are copied, because they do not fill a panel.
    whole = 0 if coded else slots // lanes
    read_keys = np.zeros(((len(panels) - whole) * lanes, dim), np.float32)
    read_values = np.empty((slots if coded else 0, width), np.float32)
    to_asked, to_logits, to_share = asked.ctypes.data, logits.ctypes.data, share.ctypes.data
    to_totals = totals.ctypes.data
    blocks = (length + lanes - 1) // lanes
    for both in range(begun // blocks, (done + blocks - 1) // blocks):
        row, head = both // heads, both % heads
        at = row * key_steps[0] + head * key_steps[1]
        value_at = row * value_steps[0] + head * value_steps[1]
        for panel in range(whole):
            first = at + panel * lanes * key_steps[2]
            pack(keys, first, key_steps[2], dim, 1.0, lanes, panels[panel])
        alone = slots - coded - whole * lanes
        first = at + whole * lanes * key_steps[2]
        _copy(keys, first, key_steps[2], read_keys[coded : coded + alone])
        lines = read_keys.reshape(-1)
        if coded:
            read_head(*key_codes, row, head, lines, 0, dim, coded, dim)
            read_head(*value_codes, row, head, read_values.reshape(-1), 0, width, coded, width)
            _copy(values, value_at, value_steps[2], read_values[coded:])
        for panel in range(whole, len(panels)):
            first = (panel - whole) * lanes * dim
            pack(lines, first, dim, dim, 1.0, lanes, panels[panel])
        to_values, value_step = values[value_at:].ctypes.data, value_steps[2]
        if coded:
            to_values, value_step = read_values.ctypes.data, width
        weight = 4 * (row * mask_steps[0] + head * mask_steps[1])
        to_mask = mask_at + weight if mask_at else none.ctypes.data
        to_above = above_at + weight if apart else none.ctypes.data
        to_below = below_at + weight if apart else none.ctypes.data
        at = row * query_steps[0] + head * query_steps[1]
        for block in range(max(0, begun - both * blocks), min(blocks, done - both * blocks)):
            begin = block * lanes
            # If the last few queries do not fill a vector, some before them are computed again.
            start = min(begin, length - lanes)
            # The first of these queries sees the slots up to and including `own`, and each
            # following query sees one more.
            own = slots - length + start
            seen = own + lanes
            totals[:] = np.float32(0.0)
            for member in range(group):
                first = at + member * query_steps[2] + start * query_steps[3]
                pack(queries, first, query_steps[3], dim, scale, lanes, asked)
                for panel in range((seen + lanes - 1) // lanes):
                    to = to_logits + 4 * lanes * lanes * panel
                    multiply(to_asked, panels[panel].ctypes.data, dim, to, lanes)
                for ahead in range(1, lanes):
                    for lane in range(ahead):
                        logits[own + ahead, lane] = -np.inf
                weigh(to_logits, to_mask, to_above, to_below, seen, to_share, apart, lanes)
                answers = out[row, head, member, start].ctypes.data
                for part in range(0, width, lanes):
                    place = 4 * min(part, width - lanes)
                    number, to = to_values + place, answers + place
                    _answer(to_logits, number, seen, value_step, to_share, to, width, lanes)
                if counted:
                    _add(to_logits, to_share, seen, to_totals, lanes)
            if counted:
                line = received[row, head, block]
                for slot in range(slots):
                    line[slot] = totals[slot].sum()
    keep(share)


_run = compile_kernel(_attend)
_WORTH_A_THREAD = 2**20
"""For fewer products than this, a separate thread costs more than it saves."""
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
    """Compute answers [batch, kv_heads, group, length, value_dim]; zero for a query that sees
    nothing.

    Args:
        queries: the queries of the tokens in the last `length` slots, in order [batch, kv_heads,
            group, length, key_dim], float32; 16 or more.
        keys, values: keys and values of exact slots [batch, kv_heads, exact, dim], float32; values
            have 16 numbers or more.
        mask: log-weights of slots, the same in numerator and denominator [batch, kv_heads, slots],
            float32; None if all are 0.
        scale: factor of the logits.
        factors: factors of slots in the numerator and in the denominator, in addition to the mask,
            from `weir.slab.attention.split_weights`; None if all are 1.
        coded: the keys and the values of quantized slots in front of the exact ones: numbers
            [batch, kv_heads, coded, dim], int8, the peak (largest absolute number) of each vector
            [batch, kv_heads, coded, 1], bfloat16, and the number of quantization steps in a peak.

    Raises:
        WeirError: there are fewer than 16 queries or numbers in a value, or fewer slots than
            queries, so that the kernel would write past its memory.
    """
    return _compute(queries, keys, values, mask, scale, factors, coded, counted=False)[0]


def causal_and_received(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    coded: tuple[QuantizedVectors, QuantizedVectors] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Compute `causal`, and the attention that slots received: the shares of each slot, summed over
    a part of consecutive queries and all heads of the group [batch, kv_heads, parts, slots],
    float32.

    Whether a part has 8 or 16 queries depends on the processor. Returns None if the number of
    queries is not divisible by this.

    Raises:
        WeirError: as for `causal`.
    """
    if queries.shape[3] % lanes():
        return None
    return _compute(queries, keys, values, mask, scale, None, coded, counted=True)


def _compute(
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
    """Compute answers, and the attention that slots received, which is empty unless `counted`."""
    if min(queries.shape[3], values.shape[3]) < LEAST_LANES:
        raise WeirError(
            f"this kernel needs at least {LEAST_LANES} queries and values of at least "
            f"{LEAST_LANES} numbers, got {queries.shape[3]} and {values.shape[3]}"
        )
    count = 0 if coded is None else coded[0][0].shape[2]
    slots, width = count + keys.shape[2], lanes()
    if slots < queries.shape[3]:
        raise WeirError(
            f"the number of queries must be at most {slots}, got {queries.shape[3]}: each query "
            "must have a slot"
        )
    out = queries.new_empty((*queries.shape[:4], values.shape[3]))
    parts = queries.shape[3] // width if counted else 0
    received = queries.new_empty((*queries.shape[:2], parts, slots))
    queries, keys, values = map(with_unit_stride, (queries, keys, values))
    of_slots = (mask, *(factors or (None, None)))
    weights = [None if t is None else t.contiguous() for t in of_slots]
    addresses = [0 if t is None else t.data_ptr() for t in weights]
    steps = next((t.stride()[:2] for t in weights if t is not None), (0, 0))
    codes = [_NO_CODES, _NO_CODES] if coded is None else [_addresses(stored) for stored in coded]
    tensors = *address_of(queries), *address_of(keys), *address_of(values), *addresses, steps
    numbers = count, scale, width, keys.shape[3], slots
    found = out.numpy(), received.numpy()
    held = queries, keys, values, weights, coded

    def some(begun: int, done: int, _held: object = held) -> None:
        _run(*tensors, *codes, *numbers, *found, begun, done)

    blocks = queries.shape[:2].numel() * -(-queries.shape[3] // width)
    run_in_threads(some, blocks, 1 + queries.numel() * slots // _WORTH_A_THREAD)
    return out, received


def _addresses(stored: QuantizedVectors) -> Codes:
    """Convert quantized vectors to the kernel's arguments."""
    numbers, peaks, levels = stored
    return *address_of(numbers), *address_of(peaks), float(levels)
