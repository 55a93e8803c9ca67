"""Quantization is within its bound, and quantizing again gives the same bits, for any numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weir.slab import FORMATS
from weir.slab.quantization import (
    Code,
    are_levels,
    block_size,
    dequantize,
    hadamard,
    quantize,
    steps,
)

pytestmark = pytest.mark.thinned(3, least=2)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CODES = list(dict.fromkeys(c for form in FORMATS.values() for c in (form.keys, form.values)))


def some(dtype: torch.dtype, seed: int, size: float, dim: int = 64) -> Tensor:
    """Return vectors of about this size: plain, steep, with outliers, rounded, signs, and zeros."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(60, dim, generator=draw)
    x[10:20] = x[10:20] ** 5
    x[20:30, 3] *= 1000
    x[30:40] = x[30:40].round()
    # All numbers of a vector have the same magnitude.
    x[40:50] = torch.rand(10, dim, generator=draw).sign()
    x[50:] = 0
    top = torch.finfo(dtype).max
    return (x * size).to(dtype).clamp(-top, top)


def error_in_steps(x: Tensor, code: Code) -> Tensor:
    """Return the largest error after reading, in steps, before rounding to the model's dtype."""
    numbers, peaks = quantize(x, code)
    off = dequantize(numbers, peaks, code, torch.float64) - x.double()
    each = steps(peaks, code).double().repeat_interleave(x.shape[-1] // peaks.shape[-1], -1)
    return ((hadamard(off) if code.rotated else off).abs() / each).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
@given(seed=st.integers(0, 2**32), power=st.integers(-40, 40))
def test_numbers_are_within_the_bound(code, dtype, seed, power):
    x = some(dtype, seed, 2.0**power)
    # A quotient is rounded once in float32, by at most 2^-24 of itself, and is at most `levels`. A
    # rotated number is a sum of 64 numbers, in six roundings.
    roundings = 2 + 64 * 6 * code.rotated
    if code.rotated and dtype == torch.float16:
        x = x.clamp(-900, 900)  # longer vectors are clipped
    assert error_in_steps(x, code) <= code.bound + code.levels * roundings * 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
@given(seed=st.integers(0, 2**32), power=st.integers(-40, 40))
def test_what_was_read_is_quantized_to_the_same_bits(code, dtype, seed, power):
    once = quantize(some(dtype, seed, 2.0**power), code)
    read = dequantize(*once, code, dtype)
    assert read.isfinite().all()
    twice = quantize(read, code)
    for one, other in zip(once, twice, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_the_ends_of_a_dtype_are_numbers_too(code, dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([info.max, -info.max, info.tiny, 0.0] * 16, dtype=dtype)[None]
    read = dequantize(*quantize(x, code), code, dtype)
    assert read.isfinite().all()
    if not code.rotated:
        most = min(info.max, torch.finfo(torch.bfloat16).max)
        assert float(read[0, 0]) >= most * (1 - 2.0**-7)
    x = torch.full((1, 64), info.tiny, dtype=dtype)
    numbers, peaks = quantize(x, code)
    assert are_levels(numbers, code) and peaks.isfinite().all()


@pytest.mark.parametrize("code", CODES, ids=str)
def test_what_is_stored_has_the_size_that_was_said(code):
    numbers, peaks = quantize(torch.randn(2, 3, 5, 64), code)
    assert numbers.shape == (2, 3, 5, code.stored(64)) and numbers.dtype == code.dtype
    assert peaks.shape == (2, 3, 5, code.peaks(64)) and peaks.dtype == torch.bfloat16
    assert are_levels(numbers, code)


def test_k8v4_has_two_numbers_to_a_byte_and_a_peak_for_each_32():
    code = FORMATS["k8v4"].values
    x = torch.zeros(1, 64)
    x[0, :3], x[0, 33:36] = torch.tensor([7.0, -3.0, 2.4]), torch.tensor([-1.4, 0.65, 0.0])
    numbers, peaks = quantize(x, code)
    assert numbers.shape == (1, 32)
    assert torch.equal(peaks, torch.tensor([[7.0, 1.4]]).bfloat16())
    assert numbers[0, :4].tolist() == [15 | 8 << 4, 5 | 1 << 4, 10 | 11 << 4, 8 | 8 << 4]
    assert not are_levels(torch.zeros(1, 32, dtype=torch.uint8), code)  # -8 is not a level
    assert "heads of 48" in FORMATS["k8v4"].wrong(64, 48)
    assert FORMATS["k8v4"].wrong(48, 64) is None


def test_fp8_is_what_pytorch_rounds_to():
    code = FORMATS["fp8"].keys
    x = torch.linspace(-1, 1, 64)[None]
    numbers, peaks = quantize(x, code)
    assert torch.equal(numbers.view(torch.float8_e4m3fn), (x * 448).to(torch.float8_e4m3fn))
    assert peaks.tolist() == [[1.0]]
    assert not are_levels(torch.tensor([[0x7F]], dtype=torch.uint8), code)  # NaN


def test_int8_is_rounding_to_a_127th_of_the_largest():
    x = torch.tensor([[1.0, -0.5, 0.2501, 0.0]])
    numbers, peaks = quantize(x, FORMATS["int8"].keys)
    assert peaks.tolist() == [[1.0]]
    assert numbers.tolist() == [[127, -64, 32, 0]]  # 63.5 is rounded to the even neighbor
    assert not are_levels(torch.tensor([[-128]], dtype=torch.int8), FORMATS["int8"].keys)
    assert math.isclose(float(steps(peaks, FORMATS["int8"].keys)), 1 / 127, rel_tol=1e-6)


@pytest.mark.parametrize("dim", [2, 6, 64, 80, 96, 128, 256, 512])
def test_rotating_is_orthogonal_and_its_own_inverse(dim):
    x, y = torch.randn(2, 5, dim, dtype=torch.float64)
    rotated = hadamard(x)
    assert torch.allclose(hadamard(rotated), x)
    assert torch.allclose((rotated * hadamard(y)).sum(-1), (x * y).sum(-1))
    one = torch.zeros(dim, dtype=torch.float64)
    one[0] = 1
    size = block_size(dim)
    assert dim % size == 0 and (dim // size % 2 == 1 or size == 256)
    assert torch.allclose(hadamard(one)[:size], torch.full((size,), size**-0.5).double())


def test_int4_spreads_an_outlier_over_all_numbers():
    """A step is a seventh of the largest rotated number, and not of the outlier."""
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] += 20.0
    rotated, plain = FORMATS["int4"].keys, FORMATS["k8v4"].values
    off = [(dequantize(*quantize(x, c), c, x.dtype) - x).norm() for c in (rotated, plain)]
    assert off[0] < off[1] / 1.5
    numbers, _ = quantize(torch.ones(1, 64), rotated)
    assert numbers[0, 0] == 15 | 8 << 4 and (numbers[0, 1:] == 8 | 8 << 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_worst_block_of_256_keeps_its_peak(dtype):
    """All numbers are at the last level and have one sign: no vector with this peak is longer."""
    code = FORMATS["int4"].keys
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        size = torch.rand(1, generator=draw) + 0.5
        signs = torch.rand(1, 256, generator=draw).sub(0.5).sign() if seed else torch.ones(1, 256)
        once = quantize((hadamard(signs) * size).to(dtype), code)
        twice = quantize(dequantize(*once, code, dtype), code)
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
