"""Types of GGUF's blocks: what the bytes of a file's lines say, as codes and scales.

Every type of `weir.kernels.block_formats` is read without rounding. Of types whose codes are places
in a grid, the `gguf` package looks up the values, with a scale of 1; each value is then the number
of a code.

Format: block_q8_0, block_q4_K and so on of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weir.errors import WeirError
from weir.kernels import BLOCK, BLOCK_TYPES, SHARED, BlockFormat

_SUPER = BLOCK * SHARED


class Parts(NamedTuple):
    """Lines of a weight, taken apart.

    Attributes:
        codes: [lines, inputs], uint8; [lines, 2 * inputs] for numbers of 16 bits.
        heads: scales, and minima if there are any, of every unit [lines, units, 1 or 2], float16.
        factors: bytes [lines, blocks, factors], for formats that have factors: of each scope (all
            of a block, or half of it) that of the scale, and that of the minimum if there is one.
    """

    codes: Tensor
    heads: Tensor
    factors: Tensor | None = None


def line_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of a line of a type in a file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return inputs // numbers * size


def inputs_of(kind: str, line: int) -> int:
    """Return how many numbers a line of so many bytes has."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return line // size * numbers


def take_apart(raw: Tensor, kind: str) -> Parts:
    """Read lines of a file.

    Args:
        raw: their bytes [lines, bytes], uint8.
        kind: one of `BLOCK_TYPES`.
    """
    return _READERS[kind](raw)


def _halves(parts: Tensor) -> Tensor:
    """float16 of bytes [..., 2 * numbers]."""
    return parts.contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Codes [..., 2 * bytes], of which the first half lies low."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _shifted(packed: Tensor, bits: int) -> Tensor:
    """Codes of few bits [..., 8 // bits, bytes] of bytes [..., bytes]; the lowest come first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return packed[..., None, :] >> shifts & ((1 << bits) - 1)


def _read_bytes(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 2 + BLOCK))
    # From -128 to 127 to what is 128 more.
    return Parts((parts[..., 2:] ^ 128).flatten(1), _halves(parts[..., :2]))


def _read_numbers(raw: Tensor) -> Parts:
    return Parts(raw, torch.empty(len(raw), raw.shape[1] // (2 * BLOCK), 0, dtype=torch.float16))


def _read_nibbles(heads: int, fifth: bool = False) -> Callable[[Tensor], Parts]:
    """A reader of codes of 4 bits, or of 5 bits of which the fifth ones come first."""

    def read(raw: Tensor) -> Parts:
        before = 2 * heads + (4 if fifth else 0)
        parts = raw.unflatten(1, (-1, before + BLOCK // 2))
        codes = _nibbles(parts[..., before:])
        if fifth:
            above = parts[..., 2 * heads : before, None] >> torch.arange(8, dtype=torch.uint8) & 1
            codes = codes | above.flatten(2) << 4
        return Parts(codes.flatten(1), _halves(parts[..., : 2 * heads]))

    return read


def _read_e8m0(raw: Tensor) -> Parts:
    """Read MXFP4: a scale is a power of two, of which float16 has those from -24 to 15."""
    parts = raw.unflatten(1, (-1, 1 + BLOCK // 2))
    power = parts[..., :1].int() - 128
    if bool(((power < -24) | (power > 15)).any()):
        raise WeirError(
            "this file has MXFP4 blocks with scales outside 2^-24 to 2^15, which weir cannot keep "
            "in blocks; load it with dtype= and without weights="
        )
    return Parts(_nibbles(parts[..., 1:]).flatten(1), torch.exp2(power.float()).half())


def _six_bits(packed: Tensor) -> Tensor:
    """The factors of Q4_K and Q5_K [..., 8, 2]: scale and minimum, of 6 bits each."""
    low, least, high = packed.unflatten(2, (3, 4)).unbind(2)
    scale = torch.cat([low & 63, high & 15 | low >> 2 & 48], dim=2)
    minimum = torch.cat([least & 63, high >> 4 | least >> 2 & 48], dim=2)
    return torch.stack([scale, minimum], dim=3)


def _read_q4_k(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 144))
    codes = _shifted(parts[..., 16:].unflatten(2, (4, BLOCK)), 4)
    return Parts(
        codes.flatten(1), _halves(parts[..., :4]), _six_bits(parts[..., 4:16]).flatten(1, 2)
    )


def _read_q5_k(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 176))
    codes = _shifted(parts[..., 48:].unflatten(2, (4, BLOCK)), 4).flatten(2, 3)
    codes = codes | _shifted(parts[..., 16:48], 1) << 4
    return Parts(
        codes.flatten(1), _halves(parts[..., :4]), _six_bits(parts[..., 4:16]).flatten(1, 2)
    )


def _by_blocks(factors: Tensor) -> Tensor:
    """Factors of halves of blocks [lines, units, 16, ...] as `Parts` has them."""
    return factors.reshape(len(factors), factors.shape[1] * SHARED, -1)


def _read_q6_k(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 210))
    low = _shifted(parts[..., :128].unflatten(2, (2, 64)), 4)  # [..., 2, 2, 64]
    high = _shifted(parts[..., 128:192].unflatten(2, (2, 32)), 2)  # [..., 2, 4, 32]
    codes = low.flatten(3).unflatten(3, (4, 32)) | high << 4
    return Parts(codes.flatten(1), _halves(parts[..., 208:]), _by_blocks(parts[..., 192:208]))


def _read_q3_k(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 110))
    high = _shifted(parts[..., :32], 1).unflatten(2, (2, 4))  # [..., 2, 4, 32]
    low = _shifted(parts[..., 32:96].unflatten(2, (2, 32)), 2)
    codes = low | high << 2  # a bit that is missing stands for 4 less
    least, most = parts[..., 96:104], parts[..., 104:108]
    factors = torch.cat([least & 15, least >> 4], dim=2)
    factors = (factors | _shifted(most, 2).flatten(2) << 4) - 32
    return Parts(codes.flatten(1), _halves(parts[..., 108:]), _by_blocks(factors))


def _read_q2_k(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 84))
    codes = _shifted(parts[..., 16:80].unflatten(2, (2, 32)), 2)
    both = torch.stack([parts[..., :16] & 15, parts[..., :16] >> 4], dim=3)
    return Parts(codes.flatten(1), _halves(parts[..., 80:]), _by_blocks(both))


def _read_tq2_0(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 66))
    codes = _shifted(parts[..., :64].unflatten(2, (2, 32)), 2)
    return _with_ones(codes.flatten(1), _halves(parts[..., 64:]))


def _read_tq1_0(raw: Tensor) -> Parts:
    """Read TQ1_0: five codes a byte, and four in the last ones, by powers of three."""
    parts = raw.unflatten(1, (-1, 54))
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    packed = [parts[..., :32], parts[..., 32:48], parts[..., 48:52]]
    counts = 5, 5, 4
    found = [
        (part[..., None, :] * powers[:count]).flatten(2)
        for part, count in zip(packed, counts, strict=True)
    ]
    codes = (torch.cat(found, dim=2).int() * 3 >> 8).to(torch.uint8)
    return _with_ones(codes.flatten(1), _halves(parts[..., 52:]))


def _with_ones(codes: Tensor, heads: Tensor) -> Parts:
    """Parts of a type whose blocks have no factors: each is 1."""
    return Parts(codes, heads, codes.new_ones(len(codes), codes.shape[1] // BLOCK, 1))


def _read_iq4_xs(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 136))
    high = _shifted(parts[..., 2:4], 2).movedim(2, 3).flatten(2)  # two bits of each block
    low = _shifted(parts[..., 4:8], 4).movedim(2, 3).flatten(2)
    factors = ((low | high << 4) - 32).flatten(1)[..., None]
    codes = _nibbles(parts[..., 8:].unflatten(2, (8, BLOCK // 2)))
    return Parts(codes.flatten(1), _halves(parts[..., :2]), factors)


def _pairs(packed: Tensor) -> Tensor:
    """Numbers of 4 bits, the lower one of each byte first."""
    return _shifted(packed, 4).movedim(-2, -1).flatten(-2)


def _words(packed: Tensor, bits: int) -> Tensor:
    """Whole numbers of bytes [..., bytes], as int64."""
    kind = {16: np.uint16, 32: np.uint32}[bits]
    return torch.from_numpy(packed.numpy().copy().view(kind).astype(np.int64))


def _read_grid(kind: str, factors_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Parts]:
    """A reader of a type whose codes are places in a grid.

    Args:
        kind: the type.
        factors_of: makes its factors [lines, units, 8 or 16] of bytes [lines, units, bytes].
    """

    def read(raw: Tensor) -> Parts:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        form = BLOCK_TYPES[kind]
        parts = raw.unflatten(1, (-1, line_bytes(kind, _SUPER))).clone()
        factors = factors_of(parts)
        heads = _take_head(parts, kind)
        numbers = dequantize(parts.flatten(1).numpy(), GGMLQuantizationType[kind])
        steps = factors.float().flatten(1)[..., None] * form.unit
        values = (torch.from_numpy(numbers).unflatten(1, (-1, form.per)) / steps).int()
        codes = _codes_of(form)[(values + form.zero).long()]
        return Parts(codes.flatten(1), heads, _by_blocks(factors).to(torch.uint8))

    return read


def _codes_of(form: BlockFormat) -> Tensor:
    """The code of every value of a table, [256]."""
    found = torch.zeros(256, dtype=torch.uint8)
    for code, value in enumerate(form.table):
        found[value] = code
    return found


def _take_head(parts: Tensor, kind: str) -> Tensor:
    """Take the scale out of units [lines, units, bytes] and put a 1 in its place."""
    if kind != "IQ1_M":
        heads = _halves(parts[..., :2].clone())
        parts[..., 0], parts[..., 1] = 0, 0x3C
        return heads
    # The upper 4 bits of each of the last four words.
    tops = parts[..., 49::2]
    nibbles = (tops >> 4).int()
    bits = nibbles[..., 0] | nibbles[..., 1] << 4 | nibbles[..., 2] << 8 | nibbles[..., 3] << 12
    one = torch.tensor([0, 0, 0xC0, 0x30], dtype=torch.uint8)
    parts[..., 49::2] = tops & 15 | one
    return bits.to(torch.int16).view(torch.float16)[..., None]


def _odd(numbers: Tensor) -> Tensor:
    """2 n + 1, as factors of these types are meant."""
    return 2 * numbers + 1


def _iq1_m_factors(parts: Tensor) -> Tensor:
    words = _words(parts[..., 48:56], 16)
    return _odd((words[..., None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(2))


_READERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q8_0": _read_bytes,
    "Q4_0": _read_nibbles(1),
    "Q4_1": _read_nibbles(2),
    "Q5_0": _read_nibbles(1, fifth=True),
    "Q5_1": _read_nibbles(2, fifth=True),
    "Q2_K": _read_q2_k,
    "Q3_K": _read_q3_k,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
    "IQ4_NL": _read_nibbles(1),
    "IQ4_XS": _read_iq4_xs,
    "IQ3_XXS": _read_grid("IQ3_XXS", lambda p: _odd(_words(p[..., 66:98], 32) >> 28)),
    "IQ3_S": _read_grid("IQ3_S", lambda p: _odd(_pairs(p[..., 106:110]))),
    "IQ2_XXS": _read_grid("IQ2_XXS", lambda p: _odd(_words(p[..., 2:66], 32)[..., 1::2] >> 28)),
    "IQ2_XS": _read_grid("IQ2_XS", lambda p: _odd(_pairs(p[..., 66:74]))),
    "IQ2_S": _read_grid("IQ2_S", lambda p: _odd(_pairs(p[..., 74:82]))),
    "IQ1_S": _read_grid("IQ1_S", lambda p: _odd(_words(p[..., 34:50], 16) >> 12 & 7)),
    "IQ1_M": _read_grid("IQ1_M", _iq1_m_factors),
    "TQ1_0": _read_tq1_0,
    "TQ2_0": _read_tq2_0,
    "MXFP4": _read_e8m0,
    "F16": _read_numbers,
    "BF16": _read_numbers,
}
