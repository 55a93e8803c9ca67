"""Loops for PyTorch's compiler are products like any others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from roundings import off, within

from weir.kernels import as_one, dots, in_memory, sums

KINDS = [torch.float32, torch.bfloat16, torch.int8]


def drawn(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 40).clamp(-127, 127).to(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "lines"), [(1, 8), (1, 7), (3, 8)])
def test_each_row_is_multiplied_with_each_line(rows: int, lines: int, kind: torch.dtype) -> None:
    x, many = drawn(2, rows, 5), drawn(2, lines, 5, kind=kind)
    size = x.double().abs() @ many.double().abs().mT
    within(dots(x, many), x.double() @ many.double().mT, off(5) * size)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_weighted_and_summed(kind: torch.dtype) -> None:
    weights, many = drawn(2, 3, 9), drawn(2, 9, 4, kind=kind)
    size = weights.double().abs() @ many.double().abs()
    within(sums(weights, many), weights.double() @ many.double(), off(9) * size)


def test_what_lies_in_memory_is_contiguous_and_the_same() -> None:
    turned = drawn(4, 6).mT
    assert torch.equal(in_memory(turned), turned)
    assert in_memory(turned).is_contiguous()


def test_an_operator_that_is_written_anew_has_another_name(tmp_path: Path) -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    made = []
    file = tmp_path / "written.py"
    for text in ("x / 2", "x * 0.5", None):
        if text is None:
            file.unlink()  # as in an archive, which has no files
        else:
            file.write_text(text)
        made.append(as_one("half", "(Tensor x) -> Tensor", half, str(file)))
    assert len({str(operator) for operator in made}) == 3
    assert all(torch.equal(operator(torch.ones(2)), torch.full((2,), 0.5)) for operator in made)
