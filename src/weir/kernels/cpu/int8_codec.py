"""Vectors written in 8 bits with one peak each, and read, on the CPU, in float32.

What `quantize` and `dequantize` of `weir.slab.quantization` give, bit for bit: the same operations,
each rounded by itself, in one pass for each vector, from one buffer into another. Roofline: a
division for each number that is written, a product for each that is read.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

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

_SIGN = np.int32(0x7FFFFFFF)
_UP = np.float32(12582912.0)
"""A sum with it has no places behind the point, so it rounds, of two equally near ones to the even
one.
"""


def _write(
    x_at: int,
    steps: Steps,
    codes_at: int,
    code_steps: Steps,
    peaks_at: int,
    peak_steps: Steps,
    shape: tuple[int, int, int, int],
    levels: np.float32,
    low: np.float32,
    high: np.float32,
) -> None:
    batch, heads, count, dim = shape
    x, codes = floats_at(x_at, WHOLE)[0], bytes_at(codes_at, WHOLE)[0]
    peaks, all_bits = shorts_at(peaks_at, WHOLE)[0], x.view(np.int32)
    peak_bits = np.empty(1, np.int32)
    peak = peak_bits.view(np.float32)
    for row in range(batch):
        for head in range(heads):
            at = row * steps[0] + head * steps[1]
            to = row * code_steps[0] + head * code_steps[1]
            top = row * peak_steps[0] + head * peak_steps[1]
            for _ in range(count):
                # Numbers without their sign are in the order of their bits.
                bits, largest = all_bits[at : at + dim], np.int32(0)
                for i in range(dim):
                    largest = max(largest, bits[i] & _SIGN)
                peak_bits[0] = largest
                peak[0] = min(max(peak[0], low), high)
                # To bfloat16, the upper half: of two equally near ones to the even one.
                odd = (peak_bits[0] >> np.int32(16)) & np.int32(1)
                half = (peak_bits[0] + np.int32(0x7FFF) + odd) >> np.int32(16)
                peaks[top] = half
                peak_bits[0] = half << np.int32(16)
                step = peak[0] / levels
                vector, written = x[at : at + dim], codes[to : to + dim]
                for i in range(dim):
                    written[i] = np.int8(np.int32((vector[i] / step + _UP) - _UP))
                at += steps[2]
                to += code_steps[2]
                top += peak_steps[2]


def _read(
    codes_at: int,
    steps: Steps,
    peaks_at: int,
    peak_steps: Steps,
    shape: tuple[int, int, int, int],
    levels: np.float32,
    out_at: int,
    out_steps: Steps,
) -> None:
    batch, heads, count, dim = shape
    codes, peaks = bytes_at(codes_at, WHOLE)[0], shorts_at(peaks_at, WHOLE)[0]
    out = floats_at(out_at, WHOLE)[0]
    peak_bits = np.empty(1, np.int32)
    peak = peak_bits.view(np.float32)
    for row in range(batch):
        for head in range(heads):
            at = row * steps[0] + head * steps[1]
            top = row * peak_steps[0] + head * peak_steps[1]
            to = row * out_steps[0] + head * out_steps[1]
            for _ in range(count):
                peak_bits[0] = np.int32(peaks[top]) << np.int32(16)
                step = peak[0] / levels
                written, vector = codes[at : at + dim], out[to : to + dim]
                for i in range(dim):
                    vector[i] = np.float32(written[i]) * step
                at += steps[2]
                top += peak_steps[2]
                to += out_steps[2]


_compiled_write, _compiled_read = compiled(_write), compiled(_read)


def quantize_int8(
    x: Tensor, codes: Tensor, peaks: Tensor, levels: int, low: float, high: float
) -> None:
    """Quantize vectors into buffers.

    Args:
        x: finite numbers [batch, heads, n, dim], float32.
        codes: written [batch, heads, n, dim], int8.
        peaks: written [batch, heads, n, 1], bfloat16.
        levels: how many steps make a peak.
        low, high: no peak is less or more.

    Raises:
        WeirError: the numbers of a vector do not lie side by side in `codes`.
    """
    if x.numel():
        bounds = np.float32(levels), np.float32(low), np.float32(high)
        x, codes, peaks = in_lines(x), in_lines(codes, written=True), in_lines(peaks, written=True)
        into = *address(codes), *address(peaks)
        _compiled_write(*address(x), *into, tuple(x.shape), *bounds)


def dequantize_int8(codes: Tensor, peaks: Tensor, levels: int, out: Tensor) -> None:
    """Read vectors from buffers into `out` [batch, heads, n, dim], float32.

    The other arguments are those of `quantize_int8`.
    """
    if codes.numel():
        codes, peaks, out = in_lines(codes), in_lines(peaks), in_lines(out, written=True)
        whence = *address(codes), *address(peaks)
        _compiled_read(*whence, tuple(codes.shape), np.float32(levels), *address(out))
