"""Loops for PyTorch's compiler are products like any others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from roundings import off, within

from weir.kernels import dot_products, materialize, weighted_sums

KINDS = [torch.float32, torch.bfloat16, torch.int8]


def drawn(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 40).clamp(-127, 127).to(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "lines"), [(1, 8), (1, 7), (3, 8)])
def test_each_row_is_multiplied_with_each_line(rows: int, lines: int, kind: torch.dtype) -> None:
    x, many = drawn(2, rows, 5), drawn(2, lines, 5, kind=kind)
    size = x.double().abs() @ many.double().abs().mT
    within(dot_products(x, many), x.double() @ many.double().mT, off(5) * size)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_weighted_and_summed(kind: torch.dtype) -> None:
    weights, many = drawn(2, 3, 9), drawn(2, 9, 4, kind=kind)
    size = weights.double().abs() @ many.double().abs()
    within(weighted_sums(weights, many), weights.double() @ many.double(), off(9) * size)


@pytest.mark.parametrize("lines", [8, 7])
def test_lines_that_are_read_at_two_places_keep_their_order(lines: int, monkeypatch: Any) -> None:
    x, many = drawn(2, 1, 5), drawn(2, lines, 5)
    once = dot_products(x, many)
    monkeypatch.setattr("weir.kernels.compiled_ops.APART", 1)
    assert torch.equal(dot_products(x, many), once)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_come_from_memory_together_keep_their_order(
    kind: torch.dtype, monkeypatch: Any
) -> None:
    weights, many = drawn(2, 3, 9), drawn(2, 9, 128, kind=kind)
    size = weights.double().abs() @ many.double().abs()
    for sums_that_fit in (0, 3 * 128):
        monkeypatch.setattr("weir.kernels.compiled_ops.SUMS", sums_that_fit)
        within(weighted_sums(weights, many), weights.double() @ many.double(), off(9) * size)


def test_what_lies_in_memory_is_contiguous_and_the_same() -> None:
    turned = drawn(4, 6).mT
    assert torch.equal(materialize(turned), turned)
    assert materialize(turned).is_contiguous()
