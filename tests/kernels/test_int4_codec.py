"""Vectors of 4 bits, rotated: what the readable quantization writes and reads, bit for bit."""

from __future__ import annotations

import pytest
import torch

from weir import kernels
from weir.slab.quantization import (
    FORMATS,
    dequantize,
    dequantize_into,
    quantize,
    quantize_into,
)

pytest.importorskip("weir.kernels.cpu.int4_codec", reason="numba is not installed")
CODE = FORMATS["int4"].keys


def vectors(dim):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 70, dim, generator=draw) * 10 ** torch.randint(
        -20, 20, (2, 3, 70, 1), generator=draw
    )
    x[0, 0, 0], x[0, 0, 1, 0], x[0, 0, 2] = 0.0, 3e38, -3e38
    x[0, 0, 3, ::2] = 1.0  # many ties
    return x


@pytest.mark.parametrize("dim", [2, 6, 16, 64, 96, 128, 512])
def test_bits_are_those_of_the_readable_code(dim):
    x = vectors(dim)
    assert kernels.quantize("int4", x) is not None and kernels.dequantize("int4", x) is not None
    # Side by side with other vectors, as slots lie in a slab.
    numbers = torch.zeros(2, 3, 80, dim // 2, dtype=torch.uint8)
    peaks = torch.zeros(2, 3, 80, 1, dtype=torch.bfloat16)
    quantize_into(x, CODE, numbers[:, :, 5:75], peaks[:, :, 5:75])
    wanted = quantize(x, CODE)
    assert torch.equal(numbers[:, :, 5:75], wanted[0])
    assert torch.equal(peaks[:, :, 5:75], wanted[1])
    assert not numbers[:, :, :5].any() and not numbers[:, :, 75:].any()
    plain = FORMATS["int4"].unrotated().keys
    out = torch.zeros(2, 3, 90, dim)
    dequantize_into(numbers[:, :, 5:75], peaks[:, :, 5:75], plain, out[:, :, 10:80])
    assert torch.equal(out[:, :, 10:80], dequantize(*wanted, plain, torch.float32))
    assert not out[:, :, :10].any() and not out[:, :, 80:].any()
