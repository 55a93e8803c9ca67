"""Random lines (rows of weights) in every type of GGUF blocks, with scales of usual sizes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.native.block_weights import Blocks

_SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 2),
    "Q3_K": (108, 1),
    "Q6_K": (208, 1),
    "TQ1_0": (52, 1),
    "TQ2_0": (64, 1),
}
"""For each type, the offset of the float16 scales in a block, and how many there are. Types that
are not listed have one at the start.
"""


def unit_of(kind: str) -> tuple[int, int]:
    """How many numbers and bytes the smallest unit of a type has; 32 numbers for 16-bit types."""
    import gguf

    if kind in ("F16", "BF16"):
        return 32, 64
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def blocks_of(lines: np.ndarray, kind: str) -> Blocks:
    """Lines [outputs, bytes of a line] as weir's blocks."""
    numbers, size = unit_of(kind)
    found = Blocks(kind, len(lines), lines.shape[1] // size * numbers)
    found.fill(0, lines)
    return found


def random_lines(kind: str, outputs: int, units: int, seed: int = 0) -> np.ndarray:
    """Random bytes [outputs, bytes of a line], in which every code and factor can occur."""
    draw = np.random.default_rng(seed)
    if kind in ("F16", "BF16"):
        numbers = torch.from_numpy(draw.normal(size=(outputs, 32 * units)))
        numbers = numbers.to(torch.float16 if kind == "F16" else torch.bfloat16)
        return numbers.view(torch.uint8).numpy()
    data = draw.integers(0, 256, (outputs, units, unit_of(kind)[1]), np.uint8)
    scales = draw.uniform(-2, 2, (outputs, units, 2)).astype(np.float16)
    if kind == "MXFP4":  # powers of two, with exponents from -24 to 15
        data[..., 0] = draw.integers(104, 144, (outputs, units))
    elif kind == "IQ1_M":  # the scale is stored as 4 bits in each of four places
        bits = scales[..., 0].copy().view(np.uint16)
        for i in range(4):
            place = 49 + 2 * i
            data[..., place] = data[..., place] & 15 | (bits >> 4 * i & 15).astype(np.uint8) << 4
    else:
        at, many = _SCALES.get(kind, (0, 1))
        data[..., at : at + 2 * many] = scales[..., :many].copy().view(np.uint8)
    return data.reshape(outputs, -1)


def dequantized(data: np.ndarray, kind: str) -> Tensor:
    """The weights as the `gguf` package dequantizes them, float32 [outputs, inputs]."""
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))


def rounded(x: Tensor) -> Tensor:
    """Round rows to steps of 1/127 of the largest absolute number of each block of 32.

    The arithmetic is float32, and the result float64.
    """
    blocks = x.float().unflatten(1, (-1, 32))
    most, all_steps = blocks.abs().amax(2, keepdim=True), torch.tensor(127.0)
    # Not `127 / most`, for which PyTorch rounds twice.
    factor = torch.where(most > 0, torch.div(all_steps, most), 0.0)
    return ((blocks * factor).round() * (most / 127)).flatten(1).double()
