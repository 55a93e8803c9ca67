"""Types of GGUF's blocks: reads codes and scales from the bytes of a file.

Every type of `weir.native.block_formats` is read without rounding. The grids of IQ types are those
of the `gguf` package.

Format: block_q8_0, block_q4_K and so on of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weir.errors import WeirError
from weir.native.block_formats import BLOCK, BLOCK_TYPES, SHARED

WIDENED = 1.1
"""weir warns of a type if its bits in memory are more than this multiple of its bits in a file."""


class Parts(NamedTuple):
    """Lines (outputs) of a weight, split into codes, scales and factors.

    Attributes:
        codes: [lines, inputs], uint8; [lines, 2 * inputs] for numbers of 16 bits.
        heads: scales, and minima if there are any, of every unit [lines, units, 1 or 2], float16;
            [lines, units, 0] for numbers of 16 bits.
        factors: bytes [lines, blocks, factors], for formats that have factors: for each block, or
            each half of it, the factor of the scale, and that of the minimum if there is one.
    """

    codes: Tensor
    heads: Tensor
    factors: Tensor | None = None


def describe_widened(kinds: Iterable[str]) -> str:
    """Return a sentence about types that take more than `WIDENED` times as many bits in memory as
    in a file; "" if there are none.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found = []
    for kind in sorted(set(kinds) & BLOCK_TYPES.keys()):
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        stored, held = 8 * size / numbers, BLOCK_TYPES[kind].bits_per_number
        if held > WIDENED * stored:
            found.append(f"{kind} (from {stored:.2f} to {held:.2f})")
    if not found:
        return ""
    return f"weights take more bits each in memory than in the file: {', '.join(found)}"


def take_apart(raw: Tensor, kind: str) -> Parts:
    """Read lines of a file.

    Args:
        raw: their bytes [lines, bytes], uint8.
        kind: one of `BLOCK_TYPES`.
    """
    return _READERS[kind](raw)


def _halves(parts: Tensor) -> Tensor:
    """Read bytes [..., 2 * numbers] as float16."""
    return parts.contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Split bytes into codes of 4 bits [..., 2 * bytes]: first the low bits of all bytes, then the
    high bits.
    """
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _shifted(packed: Tensor, bits: int) -> Tensor:
    """Split bytes [..., bytes] into codes of few bits [..., 8 // bits, bytes], the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return packed[..., None, :] >> shifts & ((1 << bits) - 1)


def _read_bytes(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 2 + BLOCK))
    # Add 128 to codes from -128 to 127.
    return Parts((parts[..., 2:] ^ 128).flatten(1), _halves(parts[..., :2]))


def _read_numbers(raw: Tensor) -> Parts:
    return Parts(raw, torch.empty(len(raw), raw.shape[1] // (2 * BLOCK), 0, dtype=torch.float16))


def _read_nibbles(heads: int, fifth: bool = False) -> Callable[[Tensor], Parts]:
    """Make a reader of blocks whose codes have 4 bits, or 5 bits if `fifth` is true.

    A block begins with `heads` numbers in float16. If codes have 5 bits, the fifth bits of all
    codes come next. The other four bits of all codes come last.
    """

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
    """Read MXFP4. A scale is a power of two; float16 can represent exponents from -24 to 15.

    Like ggml, weir doubles the values of codes (`_E2M1`), so that they are whole numbers. Therefore
    a scale is half of the power that the MX format gives for the same byte.
    """
    parts = raw.unflatten(1, (-1, 1 + BLOCK // 2))
    power = parts[..., :1].int() - 128
    if bool(((power < -24) | (power > 15)).any()):
        raise WeirError(
            "the file has MXFP4 blocks with scales outside 2^-24 to 2^15, which weir cannot keep "
            "in blocks. Load it with dtype= and without weights=."
        )
    return Parts(_nibbles(parts[..., 1:]).flatten(1), torch.exp2(power.float()).half())


def _six_bits(packed: Tensor) -> Tensor:
    """Return the factors of Q4_K and Q5_K [..., 8, 2]: scale and minimum, 6 bits each."""
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
    """Arrange factors of halves of blocks [lines, units, 16, ...] as in `Parts`."""
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
    codes = low | high << 2  # a bit that is 0 means 4 less
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
    """Read TQ1_0, whose codes are 0, 1 or 2.

    A byte has five codes, except for the last four bytes of codes, which have four each. The codes
    of a byte are the first digits of byte / 256 in base 3.
    """
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
    """Make the parts of a type whose blocks have no factors: each factor is 1."""
    return Parts(codes, heads, codes.new_ones(len(codes), codes.shape[1] // BLOCK, 1))


def _read_iq4_xs(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 136))
    high = _shifted(parts[..., 2:4], 2).movedim(2, 3).flatten(2)  # two bits of each block
    low = _shifted(parts[..., 4:8], 4).movedim(2, 3).flatten(2)
    factors = ((low | high << 4) - 32).flatten(1)[..., None]
    codes = _nibbles(parts[..., 8:].unflatten(2, (8, BLOCK // 2)))
    return Parts(codes.flatten(1), _halves(parts[..., :2]), factors)


def _pairs(packed: Tensor) -> Tensor:
    """Split bytes into numbers of 4 bits, the lower one of each byte first."""
    return _shifted(packed, 4).movedim(-2, -1).flatten(-2)


def _words(packed: Tensor, bits: int) -> np.ndarray:
    """Read bytes [..., bytes] as whole numbers of 16 or 32 bits, and return them as int64."""
    kind = {16: np.uint16, 32: np.uint32}[bits]
    return np.ascontiguousarray(packed.numpy()).view(kind).astype(np.int64)


class _Grid(NamedTuple):
    """Tables of a type for which a file stores indexes of a grid instead of codes.

    Attributes:
        codes: for each index, the codes of its values, which are positive except for IQ1 types:
            eight codes as one number of 64 bits, or four as one number of 32 bits.
        signs: for each combination of eight sign bits, the mask of 64 bits whose exclusive or with
            the codes of eight positive values gives the codes of the signed values.
    """

    codes: np.ndarray
    signs: np.ndarray


@lru_cache
def _grid(kind: str) -> _Grid:
    """Make the tables of a type.

    The signed values of a type (`form.table` minus 128) are symmetric: from last to first, they are
    the same as from first to last with opposite signs. So the code of -x is the code of x with all
    bits inverted. This does not hold for IQ1 types, whose tables have six values, but their codes
    get no signs.
    """
    from gguf import quants

    form, of = BLOCK_TYPES[kind], getattr(quants, kind)
    of.init_grid()
    values = torch.from_numpy(of.grid[0, 0])
    table = torch.zeros(256, dtype=torch.uint8)
    for code, value in enumerate(form.table):
        table[value] = code
    if kind.startswith("IQ1"):
        # The codes of -1, 0 and 1, each minus an eighth. Each of these codes plus 1 is the code of
        # the same value plus an eighth.
        codes = (2 * (values + 1)).to(torch.uint8)
    else:
        codes = table[(values + form.zero).long()]
    bits = torch.arange(256, dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    signs = bits * (len(form.table) - 1)
    word = np.uint64 if codes.shape[1] == 8 else np.uint32
    return _Grid(codes.contiguous().numpy().view(word)[:, 0], signs.numpy().view(np.uint64)[:, 0])


@lru_cache
def _seven_signs() -> np.ndarray:
    """Return eight sign bits for every number of 7 bits; the last one makes the number of set bits
    even.
    """
    numbers = np.arange(128)
    odd = np.array([bin(number).count("1") & 1 for number in numbers])
    return numbers | odd << 7


def _from_grid(kind: str, places: np.ndarray, signs: np.ndarray) -> Tensor:
    """Return codes [lines, inputs].

    Args:
        kind: the type.
        places: indexes of its grid, for each line.
        signs: bytes with the sign bits of eight numbers each.
    """
    grid = _grid(kind)
    codes = np.ascontiguousarray(grid.codes[places]).view(np.uint64) ^ grid.signs[signs].reshape(
        len(places), -1
    )
    return torch.from_numpy(codes.view(np.uint8))


def _flat(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(len(numbers), -1)


def _odd(numbers: Tensor) -> Tensor:
    """Convert stored factors n of IQ1, IQ2 and IQ3 types to 2 n + 1 [lines, blocks, factors]."""
    factors = (2 * numbers + 1).to(torch.uint8)
    return factors.reshape(len(factors), factors.shape[1] * SHARED, -1)


def _read_iq2_xxs(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 66))
    pairs = parts[..., 2:].unflatten(2, (8, 8))
    places, words = pairs[..., :4].numpy(), _words(pairs[..., 4:], 32)
    signs = _seven_signs()[words >> np.arange(0, 28, 7) & 127]
    factors = _odd(torch.from_numpy(words[..., 0] >> 28))
    codes = _from_grid("IQ2_XXS", _flat(places), _flat(signs))
    return Parts(codes, _halves(parts[..., :2]), factors)


def _read_iq2_xs(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 74))
    words = _words(parts[..., 2:66], 16)
    codes = _from_grid("IQ2_XS", _flat(words & 511), _flat(_seven_signs()[words >> 9]))
    return Parts(codes, _halves(parts[..., :2]), _odd(_pairs(parts[..., 66:])))


def _read_iq2_s(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 82))
    high = _shifted(parts[..., 66:74], 2).movedim(2, 3).flatten(2).int() << 8
    places = (parts[..., 2:34].int() | high).flatten(1).numpy()
    signs = parts[..., 34:66].flatten(1).numpy()
    codes = _from_grid("IQ2_S", places, signs)
    return Parts(codes, _halves(parts[..., :2]), _odd(_pairs(parts[..., 74:])))


def _read_iq3_xxs(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 98))
    words = _words(parts[..., 66:].unflatten(2, (8, 4)), 32)
    signs = _seven_signs()[words >> np.arange(0, 28, 7) & 127]
    factors = _odd(torch.from_numpy(words[..., 0] >> 28))
    codes = _from_grid("IQ3_XXS", _flat(parts[..., 2:66].numpy()), _flat(signs))
    return Parts(codes, _halves(parts[..., :2]), factors)


def _read_iq3_s(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 110))
    high = _shifted(parts[..., 66:74], 1).movedim(2, 3).flatten(2).int() << 8
    places = (parts[..., 2:66].int() | high).flatten(1).numpy()
    signs = parts[..., 74:106].flatten(1).numpy()
    codes = _from_grid("IQ3_S", places, signs)
    return Parts(codes, _halves(parts[..., :2]), _odd(_pairs(parts[..., 106:])))


def _shifted_grid(kind: str, places: np.ndarray, lowered: np.ndarray) -> Tensor:
    """Return codes of IQ1_S or IQ1_M: values of a grid minus an eighth where `lowered` is not 0,
    and plus an eighth elsewhere.
    """
    ones = np.uint64(0x0101010101010101)
    codes = _grid(kind).codes[places] | np.where(lowered, np.uint64(0), ones)
    return torch.from_numpy(codes.view(np.uint8))


def _read_iq1_s(raw: Tensor) -> Parts:
    parts = raw.unflatten(1, (-1, 50))
    words = _words(parts[..., 34:], 16)
    high = (words[..., None] >> np.arange(0, 12, 3) & 7) << 8
    places = parts[..., 2:34].numpy().astype(np.int64) | high.reshape(*words.shape[:2], -1)
    lowered = np.repeat(words >> 15, 4, axis=2)
    codes = _shifted_grid("IQ1_S", _flat(places), _flat(lowered))
    factors = _odd(torch.from_numpy(words >> 12 & 7))
    return Parts(codes, _halves(parts[..., :2]), factors)


def _read_iq1_m(raw: Tensor) -> Parts:
    """Read IQ1_M. The upper 4 bits of the last four words together are the scale of a unit."""
    parts = raw.unflatten(1, (-1, 56))
    high = _pairs(parts[..., 32:48]).numpy().astype(np.int64)
    places = parts[..., :32].numpy() | (high & 7) << 8
    codes = _shifted_grid("IQ1_M", _flat(places), _flat(high >> 3))
    words = _words(parts[..., 48:], 16)
    heads = (words >> 12) << np.arange(0, 16, 4)
    bits = torch.from_numpy(heads.sum(2).astype(np.uint16).view(np.int16))
    factors = torch.from_numpy(_flat(words[..., None] >> np.arange(0, 12, 3) & 7))
    factors = _odd(factors.unflatten(1, (-1, 2 * SHARED)))
    return Parts(codes, bits.view(torch.float16)[..., None], factors)


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
    "IQ3_XXS": _read_iq3_xxs,
    "IQ3_S": _read_iq3_s,
    "IQ2_XXS": _read_iq2_xxs,
    "IQ2_XS": _read_iq2_xs,
    "IQ2_S": _read_iq2_s,
    "IQ1_S": _read_iq1_s,
    "IQ1_M": _read_iq1_m,
    "TQ1_0": _read_tq1_0,
    "TQ2_0": _read_tq2_0,
    "MXFP4": _read_e8m0,
    "F16": _read_numbers,
    "BF16": _read_numbers,
}
