"""Runs a whole decode step of a decoder in one call, from a table of operations that threads share.

An *operation* is a norm, some products (with or without a norm before them), attention of some
heads, a table of angles, or a look-up in an embedding. Each operation has parts, which threads take
until none are left. Then they wait for the parts that other threads took. One part of attention
reads one *stretch*, a range of a head's slots, and the product after the attention merges the
answers of all stretches.

Addresses and sizes are in tables that are made once (`native.program`); a step changes only a few
numbers. Numbers between operations are float32, whatever the weights are.

Roofline: the bytes of all weights and slots divided by the memory bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit
from torch import Tensor

from weir.kernels.cpu.compilation import (
    ANY_ORDER,
    WHOLE,
    compile_kernel,
    doubles_at,
    floats_at,
    ints_at,
    longs_at,
    records_at,
    shorts_at,
)
from weir.kernels.cpu.decode import attend, held_at, hold, merge, scratch_size
from weir.kernels.cpu.threads import PARTS, TeamKernel, add_to, take_part, wait_until
from weir.kernels.cpu.vectors import LONG, as_float, llvm_function
from weir.native.block_formats import BLOCK
from weir.native.kernels.gates import ACTIVATIONS, gate
from weir.native.kernels.linear import multiply_part, way_of
from weir.native.kernels.linear_blocks import multiply_panels, round_rows

ANGLES, PRODUCTS, ATTENTION, NORMS, LOOK_UP = range(5)
"""Kinds of operations."""
PLAIN, NORM, MERGE = range(3)
"""Inputs of a product: numbers in memory, normalized ones, or merged answers."""
STORE, ADD, GATE = range(3)
"""Uses of products: they are stored, added to numbers, or one is the gate of the other."""
PRODUCT = np.dtype(
    [
        (name, np.int64)
        for name in (
            # The two numbers from `linear.way_of`; the number of outputs; the addresses of the
            # weight, and of its scales, or 0.
            *("way", "first", "outputs", "weight", "scale"),
            # For a weight in blocks: the result of `block_function` (negative if inputs must not be
            # rounded to 8 bits), and the bytes of a panel's codes and scales. Otherwise 0.
            *("function", "code_bytes", "scale_bytes"),
            # The address of a bias, or 0, and the bits of its numbers; the address of the output,
            # float32 [rows, outputs]; the number of parts.
            *("bias", "bias_bits", "out", "parts"),
        )
    ]
)
"""One product of an operation."""
OPERATION = np.dtype(
    [
        (name, np.int64)
        for name in (
            # All kinds: the kind; the number of parts; how many operations a thread waits for when
            # this one has no parts left (0: none; 1: only this one; 2: also the one before it; and
            # so on); the number of rows.
            *("kind", "parts", "waits", "rows"),
            # The input of products or a norm: its width, where it comes from (`PLAIN`, `NORM` or
            # `MERGE`), and the address of float32 [rows, inputs].
            *("inputs", "source", "x"),
            # Norms: weight, bias or 0, the bits of both, and whether the mean is subtracted first.
            *("weight", "weight_bits", "bias", "bias_bits", "centered"),
            # Whether there are weights in blocks, whose inputs are rounded to 8 bits.
            "rounded",
            # The address of a table of `PRODUCT` and its length; what is done with the results
            # (`STORE`, `ADD` or `GATE`), the address of float32 for this, and the activation of a
            # gate.
            *("products", "count", "then", "onto", "activation"),
            # Attention and merging: how many stretches each head has; how many KV heads the layer
            # and this operation have; the address of the numbers of this operation's KV heads among
            # those of the layer; query heads of a KV head; numbers in a key and in a value.
            *("stretches", "all_heads", "heads", "numbers", "group", "dim", "width"),
            # Addresses of float32 queries [rows, query_width], keys [rows, key_width] and values
            # [rows, value_width] from the products; these widths.
            *("queries", "keys", "values", "query_width", "key_width", "value_width"),
            # The number of rotated pairs, and addresses of tables [rows, half]; addresses of the
            # weights of norms of queries and keys, or 0, and their bits.
            *("half", "cosines", "sines", "query_norm", "key_norm", "norm_bits"),
            # Addresses of a `decode.HELD`, and of the first slot that is read and each row's newest
            # slot; how many slots a query sees, 0 for all.
            *("held", "span", "window"),
            # The address of the buffer of queries that the next fold reads [rows, heads, places,
            # group * dim], or 0, and its places; the address of the number of tokens in each tail
            # before this one [rows]; `DecodeSlots.unasked`, the number of tokens at the start of a
            # tail whose queries the fold does not read.
            *("waiting_queries", "places", "waiting", "unasked"),
            # Addresses of float32: for each row and each of `all_heads`, the answers of all
            # stretches [stretches, group, width] and then their sums [stretches, group, 2]; and the
            # largest absolute key or value [rows, most_heads], of which this operation writes the
            # first `heads` numbers of each row.
            *("partial", "largest", "most_heads"),
            # Memory that is read next, and is prefetched.
            *("ahead", "ahead_bytes"),
            # Angles: places in the stream [rows], and the turns of each pair per place, float64.
            *("where", "turns"),
            # Embeddings (`where` has the token ids, and `weight` the numbers): how many there are;
            # for weights in blocks, the result of `block_rows.block_reader`, otherwise 0.
            *("tokens", "reader", "lookup"),
        )
    ]
    # The epsilon of norms, and the number that they add to their weights; the factor of cosines and
    # sines; the factor of embeddings, or of numbers that are added to others.
    + [(name, np.float64) for name in ("epsilon", "offset", "scaling", "factor")]
    # The numbers of parts that are taken and done, in a separate cache line.
    + [(f"_{i}", np.int64) for i in range(8)]
    + [("taken", np.int64), ("done", np.int64)]
    + [(f"__{i}", np.int64) for i in range(6)]
)
"""One operation."""
_operations_at, _products_at = records_at(OPERATION), records_at(PRODUCT)
_TAKEN, _DONE = (OPERATION.fields[name][1] for name in ("taken", "done"))  # type: ignore[index]
OPERATION_SIZE = OPERATION.itemsize
_SIGN = np.int32(0x7FFFFFFF)


@njit(nogil=True)
def _stored(at: int, bits: int, i: int) -> np.float32:
    """Load a number of a float32 or bfloat16 array at an address."""
    if bits == 32:
        return floats_at(at, WHOLE)[0, i]
    return as_float(shorts_at(at, WHOLE)[0, i])


def _norm(
    x_at: int, weight: int, bits: int, epsilon: float, offset: float, dim: int, to: int
) -> None:
    """Compute `x / sqrt(mean(x^2) + epsilon) * (weight + offset)` of float32 [dim], in place or
    not.
    """
    x, out = floats_at(x_at, (1, dim))[0], floats_at(to, (1, dim))[0]
    more = np.float32(offset)
    total = np.float32(0.0)
    for i in range(dim):
        total += x[i] * x[i]
    factor = np.float32(1.0 / math.sqrt(total / dim + epsilon))
    if bits == 32:
        weights = floats_at(weight, (1, dim))[0]
        for i in range(dim):
            out[i] = x[i] * factor * (weights[i] + more)
    else:
        halves = shorts_at(weight, (1, dim))[0]
        for i in range(dim):
            out[i] = x[i] * factor * (as_float(halves[i]) + more)


def _layer_norm(
    x_at: int,
    weight: int,
    bits: int,
    bias: int,
    bias_bits: int,
    epsilon: float,
    offset: float,
    dim: int,
    to: int,
) -> None:
    """Compute `(x - mean) / sqrt(variance + epsilon) * (weight + offset) + bias` of float32
    [dim].
    """
    x, out = floats_at(x_at, (1, dim))[0], floats_at(to, (1, dim))[0]
    more = np.float32(offset)
    total = np.float32(0.0)
    for i in range(dim):
        total += x[i]
    mean = np.float32(total / dim)
    total = np.float32(0.0)
    for i in range(dim):
        apart = x[i] - mean
        total += apart * apart
    factor = np.float32(1.0 / math.sqrt(total / dim + epsilon))
    for i in range(dim):
        out[i] = (x[i] - mean) * factor * (_stored(weight, bits, i) + more)
    if bias:
        for i in range(dim):
            out[i] += _stored(bias, bias_bits, i)


def _rotate(x_at: int, half: int, cosines: int, sines: int) -> None:
    """Rotate the pairs (i, i + half) of float32 numbers, in place."""
    x, cos = floats_at(x_at, (2, half)), floats_at(cosines, (1, half))[0]
    sin = floats_at(sines, (1, half))[0]
    for i in range(half):
        one, two = x[0, i], x[1, i]
        x[0, i], x[1, i] = one * cos[i] - two * sin[i], two * cos[i] + one * sin[i]


def _copy(x_at: int, count: int, to: int, bits: int) -> np.int32:
    """Store float32 numbers as float32 or bfloat16. Returns the bits of the largest absolute
    number; those of NaN are larger than all others.
    """
    x, numbers = floats_at(x_at, (1, count))[0], ints_at(x_at, (1, count))[0]
    top = np.int32(0)
    for i in range(count):
        top = max(top, numbers[i] & _SIGN)
    if bits == 32:
        out = floats_at(to, (1, count))[0]
        for i in range(count):
            out[i] = x[i]
    else:
        halves = shorts_at(to, (1, count))[0]
        for i in range(count):
            odd = (numbers[i] >> np.int32(16)) & np.int32(1)
            near = numbers[i] + np.int32(0x7FFF) + odd
            quiet = (numbers[i] & _SIGN) > np.int32(0x7F800000)
            halves[i] = np.int16(0x7FC0) if quiet else np.int16(near >> np.int32(16))
    return top


_compiled_norm, _compiled_layer_norm, _compiled_rotate, _compiled_copy = (
    compile_kernel(function, fastmath=ANY_ORDER)
    for function in (_norm, _layer_norm, _rotate, _copy)
)


@njit(nogil=True)
def _angles(n: np.record) -> None:
    """Compute cosines and sines [rows, half] of each row's place; whole turns are subtracted in
    float64.
    """
    turns, where = doubles_at(n.turns, (1, n.half))[0], longs_at(n.where, (1, n.rows))[0]
    cos, sin = floats_at(n.cosines, (n.rows, n.half)), floats_at(n.sines, (n.rows, n.half))
    for row in range(n.rows):
        for i in range(n.half):
            turned = where[row] * turns[i]
            angle = np.float64(np.float32(turned - np.rint(turned))) * (2 * math.pi)
            cos[row, i] = np.float32(math.cos(angle) * n.scaling)
            sin[row, i] = np.float32(math.sin(angle) * n.scaling)


@llvm_function
def _call_reader(builder: ir.IRBuilder, function: Any, lookup: Any) -> None:
    """Call a function of `block_rows.block_reader`."""
    kind = ir.FunctionType(ir.VoidType(), [LONG])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [lookup])


@njit(nogil=True)
def _look_up(n: np.record) -> None:
    """Look up each row's embedding [rows, inputs], times a factor. If an id does not exist, its row
    becomes NaN; with weights in blocks, all rows do.
    """
    if n.reader:
        _call_reader(n.reader, n.lookup)
    ids, factor = longs_at(n.where, (1, n.rows))[0], np.float32(n.factor)
    for row in range(n.rows):
        out = floats_at(n.onto + 4 * row * n.inputs, (1, n.inputs))[0]
        first = ids[row] * n.inputs
        if n.reader:
            for i in range(n.inputs):
                out[i] *= factor
        elif 0 <= ids[row] < n.tokens:
            for i in range(n.inputs):
                out[i] = _stored(n.weight, n.weight_bits, first + i) * factor
        else:  # the keys of this row become NaN, and such keys are refused
            out[:] = np.float32(np.nan)


@njit(nogil=True)
def _normalize(n: np.record, x: int, to: int) -> None:
    """Compute an operation's norm of one row."""
    if n.centered:
        bias = n.bias, n.bias_bits
        sizes = n.epsilon, n.offset, n.inputs
        _compiled_layer_norm(x, n.weight, n.weight_bits, *bias, *sizes, to)
    else:
        _compiled_norm(x, n.weight, n.weight_bits, n.epsilon, n.offset, n.inputs, to)


@njit(nogil=True)
def _add_norms(n: np.record, private: int) -> None:
    """Compute norms of all rows, which are stored or added to numbers."""
    for row in range(n.rows):
        at = 4 * row * n.inputs
        if n.then != ADD:
            _normalize(n, n.x + at, n.onto + at)
            continue
        _normalize(n, n.x + at, private)
        made, onto = floats_at(private, (1, n.inputs))[0], floats_at(n.onto + at, (1, n.inputs))[0]
        factor = np.float32(n.factor)
        for i in range(n.inputs):
            onto[i] += factor * made[i]


@njit(nogil=True)
def _prepare(n: np.record, private: int) -> int:
    """Prepare an operation's input and return its address, which is in this thread's memory if the
    input had to be computed.
    """
    if n.source == PLAIN:
        return n.x
    if n.source == NORM:
        for row in range(n.rows):
            at = 4 * row * n.inputs
            _normalize(n, n.x + at, private + at)
        return private
    unit = n.group * n.width
    for row in range(n.rows):
        for head in range(n.all_heads):
            at = row * n.all_heads + head
            found = n.partial + 4 * at * n.stretches * (unit + 2 * n.group)
            sums, apart = found + 4 * n.stretches * unit, 2 * n.group
            merge(found, unit, sums, apart, n.stretches, n.group, n.width, private + 4 * at * unit)
    return private


@njit(nogil=True)
def _multiply(n: np.record, part: int, x: int, rounded: int, scratch: int) -> None:
    """Compute one part of an operation's products; `rounded` is the result of `round_rows` for
    `x`.
    """
    products = _products_at(n.products, (1, n.count))[0]
    which = 0
    if n.then != GATE:
        while part >= products[which].parts:
            part -= products[which].parts
            which += 1
    start = stop = 0
    for i in range(which, 2 if n.then == GATE else which + 1):
        p = products[i]
        if p.function:
            sizes = p.function, n.rows, n.inputs // BLOCK, p.outputs
            weight = p.weight, p.code_bytes, p.scale, p.scale_bytes
            given = rounded if p.function > 0 else x
            start, stop = multiply_panels(*sizes, *weight, given, p.out, part, p.parts)
        else:
            shape = p.way, p.first, n.rows, n.inputs, p.outputs
            start, stop = multiply_part(*shape, x, p.weight, p.scale, p.out, part, p.parts)
        if p.bias:
            for row in range(n.rows):
                out = floats_at(p.out + 4 * row * p.outputs, (1, p.outputs))[0]
                for j in range(start, stop):
                    out[j] += _stored(p.bias, p.bias_bits, j)
    outputs = products[which].outputs
    for row in range(n.rows):
        at = 4 * (row * outputs + start)
        if n.then == ADD:
            out = floats_at(products[which].out + at, (1, stop - start))[0]
            onto = floats_at(n.onto + at, (1, stop - start))[0]
            factor = np.float32(n.factor)
            for j in range(stop - start):
                onto[j] += factor * out[j]
        elif n.then == GATE:
            pair = products[0].out + at, products[1].out + at
            gate(*pair, stop - start, n.activation, scratch, n.onto + at)


@njit(nogil=True)
def _attend(n: np.record, part: int, scratch: int) -> None:
    """Attend to one stretch of the slots of one head. The thread that reads the last stretch also
    stores the new key and value.
    """
    unit, stretch = part // n.stretches, part % n.stretches
    row, local = unit // n.heads, unit % n.heads
    head = longs_at(n.numbers, WHOLE)[0, local]
    held, span = held_at(n.held, (1, 1))[0, 0], longs_at(n.span, WHOLE)[0]
    newest, first = span[1 + row], span[0]
    if n.window:
        first = max(first, newest + 1 - n.window)
    count = newest + 1 - first
    begin, end = (
        first + count * stretch // n.stretches,
        first + count * (stretch + 1) // n.stretches,
    )
    queries, key = scratch, scratch + 4 * n.group * n.dim
    more = key + 4 * n.dim
    cos, sin = n.cosines + 4 * row * n.half, n.sines + 4 * row * n.half
    for member in range(n.group):
        to, at = queries + 4 * member * n.dim, (head * n.group + member) * n.dim
        _compiled_copy(n.queries + 4 * (row * n.query_width + at), n.dim, to, 32)
        if n.query_norm:
            _compiled_norm(to, n.query_norm, n.norm_bits, n.epsilon, n.offset, n.dim, to)
        if n.half:
            _compiled_rotate(to, n.half, cos, sin)
    if stretch + 1 == n.stretches:
        _compiled_copy(n.keys + 4 * (row * n.key_width + head * n.dim), n.dim, key, 32)
        if n.key_norm:
            _compiled_norm(key, n.key_norm, n.norm_bits, n.epsilon, n.offset, n.dim, key)
        if n.half:
            _compiled_rotate(key, n.half, cos, sin)
        slot, size = unit * held.exact + newest - held.quantized, held.bits // 8
        top = _compiled_copy(key, n.dim, held.keys + slot * n.dim * size, held.bits)
        value = n.values + 4 * (row * n.value_width + head * n.width)
        other = _compiled_copy(value, n.width, held.values + slot * n.width * size, held.bits)
        ints_at(n.largest, WHOLE)[0, row * n.most_heads + local] = max(top, other)
        if n.waiting_queries:
            place = max(0, longs_at(n.waiting, WHOLE)[0, row] - n.unasked)
            line = (unit * n.places + place) * n.group * n.dim
            to = n.waiting_queries + line * size
            _compiled_copy(queries, n.group * n.dim, to, held.bits)
    size, at = n.group * n.width, row * n.all_heads + head
    found = n.partial + 4 * at * n.stretches * (size + 2 * n.group)
    sums = found + 4 * (n.stretches * size + stretch * 2 * n.group)
    sunk = 1 if stretch == 0 else 0
    # Each part prefetches its share of the next weight.
    ahead = n.ahead + n.ahead_bytes * part // n.parts
    stop = n.ahead + n.ahead_bytes * (part + 1) // n.parts
    to = found + 4 * stretch * size
    attend(n.held, unit, begin, end, sunk, queries, more, to, sums, ahead, stop)


def _run_step(address: int) -> None:
    """Run all operations of a step as one of several threads."""
    numbers = longs_at(address, (1, 6))[0]
    table, count, private, size = numbers[2], numbers[3], numbers[4], numbers[5]
    private += 4 * size * take_part(address)
    for i in range(count):
        at = table + i * OPERATION_SIZE
        n = _operations_at(at, (1, 1))[0, 0]
        part = add_to(at + _TAKEN, 1)
        x = np.int64(0)
        while part < n.parts:
            if n.kind == PRODUCTS:
                rounded = private + 4 * n.rows * n.inputs
                if x == 0:
                    x = _prepare(n, private)
                    if n.rounded:
                        round_rows(n.rows, n.inputs // BLOCK, x, rounded)
                _multiply(n, part, x, rounded, private + 8 * n.rows * n.inputs)
            elif n.kind == ATTENTION:
                _attend(n, part, private)
            elif n.kind == ANGLES:
                _angles(n)
            elif n.kind == LOOK_UP:
                _look_up(n)
            else:
                _add_norms(n, private)
            add_to(at + _DONE, 1)
            part = add_to(at + _TAKEN, 1)
        for before in range(n.waits):
            other = at - before * OPERATION_SIZE
            wait_until(other + _DONE, _operations_at(other, (1, 1))[0, 0].parts)


_run_together = TeamKernel(_run_step)
_WORTH_A_PART = 2**15
"""For fewer numbers of a weight than this, a separate part costs more than it saves."""
_MOST_STRETCHES = 4


_CODES: dict[str, int] = {
    "angles": ANGLES,
    "products": PRODUCTS,
    "attention": ATTENTION,
    "norms": NORMS,
    "look_up": LOOK_UP,
    "plain": PLAIN,
    "norm": NORM,
    "merge": MERGE,
    "store": STORE,
    "add": ADD,
    "gate": GATE,
    **ACTIVATIONS,
}


class StepTable:
    """The operations of a step, in order. It is made once, and run in every step.

    Attributes:
        rows: number of rows in the batch.
        threads: number of threads that run the operations.
        operations: an array of `OPERATION`, after `finish` was called.

    Args:
        rows, threads: see the attributes.
    """

    operations: np.ndarray

    def __init__(self, rows: int, threads: int) -> None:
        self.rows, self.threads = rows, threads
        self._made: list[dict[str, Any]] = []
        self._held: list[Any] = []
        self._needed = 0

    @staticmethod
    def compile() -> None:
        """Compile the kernel, or load it from numba's cache."""
        _run_together.compile()

    def memory(self, *shape: int) -> Tensor:
        """Allocate float32 memory that the operations share."""
        with torch.inference_mode(False):  # steps inside and outside inference mode write to it
            self._held.append(torch.zeros(shape))
        found: Tensor = self._held[-1]
        return found

    def add(self, kind: str, parts: int = 1, *, waits: int = 1, **fields: Any) -> int:
        """Add an operation, and return its number. Fields are those of `OPERATION`; pass a tensor
        for an address, and a name for a constant.
        """
        self._held += [t for t in fields.values() if isinstance(t, Tensor | np.ndarray)]
        fields = {"factor": 1.0, **fields}
        fields |= {"kind": kind, "parts": parts, "waits": waits, "rows": self.rows}
        self._made.append({name: _address(value) for name, value in fields.items()})
        return len(self._made) - 1

    def multiply(self, weights: Sequence[Any], outs: Sequence[Tensor], **fields: Any) -> np.ndarray:
        """Add products of one input with some weights (`native.form.Weight`), and return their
        table, which can be changed between steps.
        """
        products = np.zeros(len(weights), PRODUCT)
        inputs = weights[0].inputs
        for at, weight, out in zip(products, weights, outs, strict=True):
            outputs, bits = weight.outputs, 8 * weight.numbers.itemsize
            at["function"] = weight.function
            if weight.function:
                for name, part in (("code_bytes", weight.numbers), ("scale_bytes", weight.scale)):
                    at[name] = part[0].nbytes
            else:
                at["way"], at["first"] = way_of(self.rows, bits, outputs)
            at["outputs"], at["weight"] = outputs, _address(weight.numbers)
            at["scale"], at["bias"] = _address(weight.scale), _address(weight.bias)
            at["bias_bits"] = 0 if weight.bias is None else 8 * weight.bias.itemsize
            at["out"] = _address(out)
            worth = min(weight.numbers.numel() // _WORTH_A_PART, self.threads * PARTS)
            at["parts"] = max(1, worth) if self.threads > 1 else 1
            self._held += [out, weight]
        gated = fields.get("then") == "gate"
        if gated:
            # A part has the same outputs of both weights. Weights in blocks are divided into
            # panels, others into tiles, so a pair with one of each is not divided.
            alike = len({bool(weight.function) for weight in weights}) == 1
            products["parts"] = products["parts"].min() if alike else 1
        parts = int(products["parts"][0] if gated else products["parts"].sum())
        powers = 2 * int(products["outputs"].max()) if gated else 0
        self._needed = max(self._needed, 2 * self.rows * inputs + powers)
        fields |= {"rounded": int((products["function"] > 0).any())}
        self.add("products", parts, inputs=inputs, products=products, count=len(weights), **fields)
        return products

    def add_attention(
        self, held: np.ndarray, heads: int, slots: int, waits: int, **fields: Any
    ) -> int:
        """Add attention of some heads of a layer, and return the operation's number.

        Args:
            held: the layer's slots, from `hold`.
            heads: number of KV heads.
            slots: number of slots of a head.
            waits, fields: of the operation; `fields` must have `stretches`.
        """
        group, dim, width = (int(held[0][name]) for name in ("group", "dim", "width"))
        # In Python, so that numba does not have to compile a sum.
        size = (group + 1) * dim + scratch_size.py_func(group, dim, width, slots)
        self._needed = max(self._needed, size)
        sizes = {"heads": heads, "group": group, "dim": dim, "width": width}
        parts = self.rows * heads * fields["stretches"]
        return self.add("attention", parts, waits=waits, held=held, **sizes, **fields)

    def hold(self, *slots: Any) -> np.ndarray:
        """Describe slots for `add_attention`; arguments are those of `decode.hold`."""
        self._held += slots
        return hold(*slots)

    def stretches(self, heads: int) -> int:
        """Return in how many stretches to read each of `heads` heads, so that all threads have
        about the same amount of work.
        """
        units = self.rows * heads

        def longest(count: int) -> float:
            return -(-units * count // self.threads) / count

        return min(range(1, _MOST_STRETCHES + 1), key=lambda count: longest(count) + 0.05 * count)

    def finish(self) -> None:
        """Make the tables."""
        self.operations = np.zeros(len(self._made), OPERATION)
        for at, made in zip(self.operations, self._made, strict=True):
            for name, value in made.items():
                at[name] = value
        self._private = self.memory(self.threads, self._needed)
        # Look up now what each step needs from these tables, because that is slow in NumPy.
        self._counters = self.operations["taken"], self.operations["done"]
        self._start = self.operations.ctypes.data
        self._memory = self._private.data_ptr(), self._private.shape[1]

    def __len__(self) -> int:
        """Return the number of operations so far."""
        return len(self._made)

    def run(self, first: int = 0, stop: int | None = None) -> None:
        """Run all operations, or those from `first` on and before `stop`.

        What these operations read from earlier ones must be in memory already.
        """
        stop = len(self._made) if stop is None else stop
        for counts in self._counters:
            counts[first:stop] = 0
        start = self._start + first * OPERATION_SIZE
        _run_together(self.threads, start, stop - first, *self._memory)


def _address(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    if isinstance(value, str):
        return _CODES[value]
    return 0 if value is None else value
