"""The kernels for products of few rows agree with PyTorch, up to the rounding of sums in another
order.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.nn.functional as F

linear_kernel = pytest.importorskip("weir.native.kernels.linear", reason="numba is not installed")
linear = linear_kernel.linear

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (2, 3), (5, 7), (6, 33), (7, 64), (12, 3), (13, 16), (30, 129)]


def drawn(rows, outputs, inputs, dtype, bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, added = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    return x, weight, added if bias else None


def bound(x, weight, bias):
    """Bound the error of a sum in any order, inputs * eps * sum |w x|, plus the rounding of the
    result.
    """
    parts = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        parts += bias.double().abs()
    summed = (weight.shape[1] + 1) * torch.finfo(torch.float32).eps
    return parts * (summed + torch.finfo(x.dtype).eps / 2)


@pytest.fixture(params=[8, 16])
def widest(request, monkeypatch):
    """Use the tiles of processors whose vectors hold 8 numbers, and 16."""
    monkeypatch.setattr(linear_kernel, "lanes", lambda: request.param)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_pytorchs(dtype, bias, widest):
    for outputs, inputs in SHAPES:
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 25, 41):
            x, weight, added = drawn(rows, outputs, inputs, dtype, bias)
            out = linear(x, weight, added)
            assert out.dtype == dtype
            exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
            assert (out.double() - exact).abs().le(bound(x, weight, added)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_with_8_bits_are_those_of_what_the_bits_stand_for(dtype, widest):
    for outputs, inputs in (*SHAPES, (3, 200)):  # not whole vectors or cache lines
        for rows in (1, 2, 3, 4, 5, 7, 16, 17):
            x, weight, scale = drawn(rows, outputs, inputs, dtype, True)
            numbers = (60 * weight.float()).clamp(-128, 127).to(torch.int8)
            numbers[0, 0] = -128
            out = linear_kernel.linear_int8(x.view(1, rows, inputs), numbers, scale)
            assert out.dtype == dtype and out.shape == (1, rows, outputs)
            meant = numbers.double() * scale.double()[:, None]
            assert (out[0].double() - x.double() @ meant.T).abs().le(bound(x, meant, None)).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_with_8_bits_what_is_no_number_stays_none(rows, widest):
    x, weight, scale = drawn(rows, 13, 80, torch.float32, True)
    numbers = (60 * weight).clamp(1, 127).to(torch.int8)
    x[0, 70] = torch.nan
    x[-1, 3] = torch.inf if rows > 1 else torch.nan
    out = linear_kernel.linear_int8(x, numbers, scale.abs())
    assert out[0].isnan().all()
    assert rows == 1 or (out[-1] == torch.inf).all()
    assert out[1:-1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_told_the_same_whoever_else_is_in_the_tile(dtype, widest):
    x, weight, bias = drawn(40, 30, 70, dtype, True)
    together = linear(x, weight, bias)
    for some in (slice(5), slice(3, 20), slice(24, 40), slice(11, 36)):
        assert torch.equal(linear(x[some], weight, bias), together[some])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 8])
def test_a_weight_may_lie_in_any_way(dtype, rows, widest):
    x, weight, _ = drawn(rows, 30, 70, dtype, False)
    turned, alike = weight.T.contiguous().T, weight[:1].expand(30, 70)
    assert not turned.is_contiguous()
    assert torch.equal(linear(x, turned), linear(x, weight))
    assert torch.equal(linear(x, alike), linear(x, alike.contiguous()))


def test_any_dimensions_before_the_last_and_any_strides_of_x():
    x, weight, bias = drawn(12, 5, 8, torch.float32, True)
    flat = linear(x, weight, bias)
    assert torch.equal(linear(x.view(3, 4, 8), weight, bias), flat.view(3, 4, 5))
    wide = torch.stack([x, x], dim=1).flatten(1)[:, :8]
    assert not wide.is_contiguous()
    assert torch.equal(linear(wide, weight, bias), flat)
    assert linear(x.T.contiguous().T, weight, bias).equal(flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_none(dtype):
    for rows in (1, 9):
        x, weight, _ = drawn(rows, 6, 20, dtype, False)
        weight[1, 3], weight[2, 4], weight[3] = torch.nan, torch.inf, 0
        x[0, 4] = 1
        out, wanted = linear(x, weight), F.linear(x, weight)
        assert out[:, 1].isnan().all()
        assert torch.equal(out[:, 2], wanted[:, 2])
        assert out[0, 2] == torch.inf
        assert (out[:, 3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_however_many_threads_there_are_the_answer_is_the_same(dtype, monkeypatch):
    monkeypatch.setattr(linear_kernel, "_WORTH_A_THREAD", 1)
    before = torch.get_num_threads()
    for rows in (1, 3, 5, 10):
        x, weight, bias = drawn(rows, 29, 40, dtype, True)
        answers = []
        for threads in (1, 2, 3, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            bits = 40 * weight.float()
            eight = linear_kernel.linear_int8(x, bits.clamp(-127, 127).to(torch.int8), bias)
            answers.append(torch.cat([linear(x, weight, bias), eight]))
        assert all(torch.equal(answer, answers[0]) for answer in answers)
        tiny = linear(*drawn(rows, 1, 4, dtype, True))  # fewer outputs than threads
        assert tiny.shape == (rows, 1)
    monkeypatch.undo()
    assert torch.get_num_threads() == before


def test_a_fork_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(linear_kernel, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, weight, _ = drawn(1, 8, 16, torch.float32, False)
    wanted = linear(x, weight)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that waits for its parent's thread would never end
        os._exit(0 if torch.equal(linear(x, weight), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_does_not_fit_is_refused_as_by_pytorch():
    """The machine code relies on the sizes. With wrong ones, it would write past the result."""
    x, weight, bias = drawn(1, 6, 8, torch.float32, True)
    numbers = torch.ones(6, 8, dtype=torch.int8)
    for wrong in (torch.ones(1, 16), torch.ones(5, 4), torch.ones(1, 0), torch.tensor(1.0)):
        for multiply in (lambda x: linear(x, weight, bias), lambda x: F.linear(x, weight, bias)):
            with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|at least 1D"):
                multiply(wrong)
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|at least 1D"):
            linear_kernel.linear_int8(wrong, numbers, bias)
    assert torch.equal(linear(x, weight, bias[:1]), F.linear(x, weight, bias[:1]))
    with pytest.raises(RuntimeError):
        linear(x, weight, bias[:3])
    with pytest.raises(RuntimeError):
        linear(x, weight, bias.to("meta"))


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_products_of_nothing_are_those_of_pytorch(rows):
    for outputs, inputs in ((5, 0), (0, 8), *(((13, 16),) if rows == 0 else ())):
        x, weight, bias = drawn(rows, outputs, inputs, torch.float32, True)
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
        eight = linear_kernel.linear_int8(x, weight.to(torch.int8), bias)
        assert torch.equal(eight, torch.zeros(rows, outputs))
