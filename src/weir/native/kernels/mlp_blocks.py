"""A gated MLP with weights in blocks, for many rows, on the CPU.

Some rows go through all three products before the next rows, so intermediate results stay in the
processor's cache, and a row is rounded to 8 bits once for gate and up. Threads share the rows.

Roofline: the same as for `linear_blocks`.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from weir.errors import WeirError
from weir.kernels.cpu.compilation import keep, longs_at
from weir.kernels.cpu.threads import TeamKernel, take_part
from weir.native.block_formats import BLOCK
from weir.native.dispatch import BlockWeight
from weir.native.kernels.gates import ACTIVATIONS, gate
from weir.native.kernels.linear_blocks import SUPPORTED as BLOCKS_SUPPORTED
from weir.native.kernels.linear_blocks import (
    block_function,
    memory_of,
    multiply_panels,
    round_rows,
    rounded_size,
    rows_of_part,
    threads_of,
)

SUPPORTED = BLOCKS_SUPPORTED
"""Whether this processor supports products with blocks."""


def _run_rows(address: int) -> None:
    """Run the MLP on some rows, then on the next; threads share the rows."""
    n = longs_at(address, (1, 25))[0]
    some, count, blocks, inner, outputs, activation = n[2], n[3], n[4], n[5], n[6], n[7]
    gate_function, up_function, down_function = n[8], n[9], n[10]
    x, out, width = n[11], n[12], inner * BLOCK
    rounded = np.empty(rounded_size(some, max(blocks, inner)), np.int8)
    products = np.empty((2, some * width), np.float32)
    powers = np.empty(2 * width, np.float32)
    at, gates, power = rounded.ctypes.data, products.ctypes.data, powers.ctypes.data
    ups = gates + 4 * some * width
    row = some * take_part(address)
    while row < count:
        rows = min(some, count - row)
        given = x + 4 * row * blocks * BLOCK
        round_rows(rows, blocks, given, at)
        sizes, weight = (gate_function, rows, blocks, width), (n[13], n[14], n[15], n[16])
        numbers = at if gate_function > 0 else given
        multiply_panels(*sizes, *weight, numbers, gates, 0, 1)
        sizes, weight = (up_function, rows, blocks, width), (n[17], n[18], n[19], n[20])
        numbers = at if up_function > 0 else given
        multiply_panels(*sizes, *weight, numbers, ups, 0, 1)
        for i in range(rows):
            far = 4 * i * width
            gate(gates + far, ups + far, width, activation, power, gates + far)
        round_rows(rows, inner, gates, at)
        to = out + 4 * row * outputs
        sizes, weight = (down_function, rows, inner, outputs), (n[21], n[22], n[23], n[24])
        numbers = at if down_function > 0 else gates
        multiply_panels(*sizes, *weight, numbers, to, 0, 1)
        row = some * take_part(address)
    keep(rounded)
    keep(products)
    keep(powers)


_run_together = TeamKernel(_run_rows)


def mlp_blocks(
    x: Tensor, gate: BlockWeight, up: BlockWeight, down: BlockWeight, activation: str
) -> Tensor | None:
    """Compute `down(activation(gate(x)) * up(x))` with the products of `linear_blocks`; None for
    too few rows.

    Args:
        x: [..., inputs], float32 or bfloat16, without gradients. Intermediate results are not
            rounded to bfloat16.
        gate, up: weights with the same number of outputs, a multiple of 32; their types can differ.
        down: a weight with that number of inputs.
        activation: one of `ACTIVATIONS`.
    """
    blocks, inner, outputs = gate[0].shape[1], down[0].shape[1], down[2]
    rows = x.numel() // (blocks * BLOCK)
    threads = threads_of(rows, gate[0])
    some = rows_of_part(rows, threads)
    if not some:
        return None
    if blocks != up[0].shape[1] or not gate[2] == up[2] == inner * BLOCK:
        raise WeirError("the sizes of gate, up and down do not fit together")
    given = x.float().contiguous()
    out = given.new_empty((*x.shape[:-1], outputs))
    sizes = some, rows, blocks, inner, outputs, ACTIVATIONS[activation]
    functions = (block_function(weight[3]) for weight in (gate, up, down))
    weights = [number for weight in (gate, up, down) for number in memory_of(*weight[:2])]
    _run_together(threads, *sizes, *functions, given.data_ptr(), out.data_ptr(), *weights)
    return out.to(x.dtype)
