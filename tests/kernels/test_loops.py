"""Loops for PyTorch's compiler are products like any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("lines", [8, 7])
def test_lines_that_are_read_at_two_places_keep_their_order(lines: int, monkeypatch: Any) -> None:
    x, many = drawn(2, 1, 5), drawn(2, lines, 5)
    once = dots(x, many)
    monkeypatch.setattr("weir.kernels.loops.APART", 1)
    assert torch.equal(dots(x, many), once)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_come_from_memory_together_keep_their_order(
    kind: torch.dtype, monkeypatch: Any
) -> None:
    weights, many = drawn(2, 3, 9), drawn(2, 9, 128, kind=kind)
    size = weights.double().abs() @ many.double().abs()
    for sums_that_fit in (0, 3 * 128):
        for name in ("WIDE", "NARROW"):
            monkeypatch.setattr(f"weir.kernels.loops.{name}", sums_that_fit)
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
