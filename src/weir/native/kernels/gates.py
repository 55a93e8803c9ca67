"""The gate of an MLP on the CPU: an activation times the up projection."""

from __future__ import annotations

import numpy as np

from weir.kernels.cpu.compilation import ANY_ORDER, compile_kernel, floats_at, ints_at
from weir.kernels.cpu.softmax import split_exponential

SILU, GELU = range(2)
"""Activations: x / (1 + e^-x), and GELU by tanh."""
ACTIVATIONS = {"silu": SILU, "gelu": GELU}
_TOP = np.float32(87.0)


def _gate(gate_at: int, up_at: int, count: int, activation: int, scratch: int, to: int) -> None:
    """Compute `activation(gate) * up` of float32 [count]; the output can be the memory of either
    input. `scratch` has twice as many numbers.
    """
    gate, up = floats_at(gate_at, (1, count))[0], floats_at(up_at, (1, count))[0]
    out, near_one = floats_at(to, (1, count))[0], floats_at(scratch, (1, count))[0]
    power, scaled = ints_at(scratch, (2, count))[1], floats_at(scratch, (2, count))[1]
    for i in range(count):
        x = gate[i]
        if activation == GELU:
            x = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)
        near_one[i], power[i] = split_exponential(min(max(-x, -_TOP), _TOP))
    for i in range(count):
        out[i] = gate[i] / (np.float32(1.0) + near_one[i] * scaled[i]) * up[i]


gate = compile_kernel(_gate, fastmath=ANY_ORDER)
