"""Kernels write and read vectors in 8 and 4 bits as PyTorch does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from weir.slab.quantization import (
    FORMATS,
    INT8,
    dequantize,
    dequantize_into,
    quantize,
    quantize_into,
)

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")

from weir.kernels import dispatch

INT4 = FORMATS["int4"].keys


@given(
    st.integers(0, 2**32), st.integers(-130, 125), st.sampled_from([1, 7, 64]), st.integers(0, 9)
)
def test_int8_has_the_same_bits(seed, power, dim, count):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 12, dim, generator=generator)[:, :, 1 : count + 1]
    x = x * 2.0 ** (power + torch.randint(-3, 3, x.shape[:3], generator=generator))[..., None]
    if count > 2:
        x[:, :, 0] = 0.0
        x[:, :, 1] = x[:, :, 1].sign() * 63.5  # halfway between two steps: rounded to even
        x[:, :, 1, 0] = 127.0
        x[:, :, 2] = torch.finfo(torch.float32).max
    if count > 4:  # peaks halfway between two bfloat16 numbers: rounded to even
        x[:, :, 3:5] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])[:, None]
    numbers, peaks = quantize(x, INT8)
    # The strides of vectors, numbers and peaks can be any.
    codes = torch.full((2, 3, 20, dim + 2), 99, dtype=torch.int8)[..., :dim]
    tops = torch.zeros(2, 3, 20, 3, dtype=torch.bfloat16)[..., :1]
    here = slice(4, 4 + x.shape[2])
    quantize_into(x, INT8, codes[:, :, here], tops[:, :, here])
    assert torch.equal(codes[:, :, here], numbers)
    assert torch.equal(tops[:, :, here], peaks)
    assert (codes[:, :, :4] == 99).all() and (codes[:, :, here.stop :] == 99).all()
    out = torch.zeros(2, 3, 20, dim)
    dequantize_into(codes[:, :, here], tops[:, :, here], INT8, out[:, :, here])
    assert torch.equal(out[:, :, here], dequantize(numbers, peaks, INT8, torch.float32))
    assert not out[:, :, :4].any() and not out[:, :, here.stop :].any()


def test_a_peak_halfway_between_two_is_rounded_to_the_even_one():
    # 1 + 2^-8 is halfway between 1 (even) and 1 + 2^-7. 1 + 3 * 2^-8 is halfway between 1 + 2^-7
    # and 1 + 2^-6 (even).
    x = (1 + torch.tensor([1, 3]) * 2.0**-8).view(1, 1, 2, 1)
    numbers, peaks = torch.zeros(x.shape, dtype=torch.int8), torch.zeros(x.shape).bfloat16()
    quantize_into(x, INT8, numbers, peaks)
    assert peaks.flatten().tolist() == [1.0, 1 + 2.0**-6]


@pytest.mark.own_kernels
def test_a_graph_that_is_compiled_has_no_kernel(monkeypatch):
    x = torch.zeros(1)
    assert dispatch.quantize("int8", x) is not None
    assert dispatch.dequantize("int8", x.bfloat16()) is None
    assert dispatch.rotate_keys(x.clone().requires_grad_()) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dispatch.quantize("int8", x) is None


def test_tensors_without_an_address_go_to_pytorch():
    x = torch.randn(1, 1, 2, 4)
    numbers, peaks = quantize(x, INT8)
    wanted = dequantize(numbers, peaks, INT8, torch.float32)

    def read(numbers: torch.Tensor) -> torch.Tensor:
        out = torch.empty(numbers.shape)
        dequantize_into(numbers, peaks, INT8, out)
        return out

    assert torch.equal(torch.func.functionalize(read)(numbers), wanted)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert read(fake.from_tensor(numbers)).shape == wanted.shape


def vectors(dim):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 70, dim, generator=draw) * 10 ** torch.randint(
        -20, 20, (2, 3, 70, 1), generator=draw
    )
    x[0, 0, 0], x[0, 0, 1, 0], x[0, 0, 2] = 0.0, 3e38, -3e38
    x[0, 0, 3, ::2] = 1.0  # many ties
    return x


@pytest.mark.parametrize("dim", [2, 6, 16, 64, 96, 128, 512])
@pytest.mark.own_kernels
def test_int4_has_the_same_bits(dim):
    x = vectors(dim)
    assert dispatch.quantize("int4", x) is not None and dispatch.dequantize("int4", x) is not None
    # Between other vectors, as slots are stored in a slab.
    numbers = torch.zeros(2, 3, 80, dim // 2, dtype=torch.uint8)
    peaks = torch.zeros(2, 3, 80, 1, dtype=torch.bfloat16)
    quantize_into(x, INT4, numbers[:, :, 5:75], peaks[:, :, 5:75])
    wanted = quantize(x, INT4)
    assert torch.equal(numbers[:, :, 5:75], wanted[0])
    assert torch.equal(peaks[:, :, 5:75], wanted[1])
    assert not numbers[:, :, :5].any() and not numbers[:, :, 75:].any()
    for code in (FORMATS["int4"].unrotated().keys, INT4):
        out = torch.zeros(2, 3, 90, dim)
        dequantize_into(numbers[:, :, 5:75], peaks[:, :, 5:75], code, out[:, :, 10:80])
        assert torch.equal(out[:, :, 10:80], dequantize(*wanted, code, torch.float32))
        assert not out[:, :, :10].any() and not out[:, :, 80:].any()


@pytest.mark.parametrize("code", [INT8, INT4], ids=["int8", "int4"])
def test_threads_share_vectors(code):
    x = torch.randn(1, 2, 1501, 64, generator=torch.manual_seed(0))
    wanted = quantize(x, code)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        numbers, peaks = (torch.zeros_like(t) for t in wanted)
        quantize_into(x, code, numbers, peaks)
        out = torch.zeros_like(x)
        dequantize_into(numbers, peaks, code, out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(numbers, wanted[0]) and torch.equal(peaks, wanted[1])
    assert torch.equal(out, dequantize(*wanted, code, torch.float32))
