"""Loops for PyTorch's compiler are products like any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from roundings import off, within
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from weir.kernels import dot_products, materialize, register_operator, weighted_sums

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
        for name in ("WIDE", "NARROW"):
            monkeypatch.setattr(f"weir.kernels.compiled_ops.{name}", sums_that_fit)
        within(weighted_sums(weights, many), weights.double() @ many.double(), off(9) * size)


def test_what_lies_in_memory_is_contiguous_and_the_same() -> None:
    turned = drawn(4, 6).mT
    assert torch.equal(materialize(turned), turned)
    assert materialize(turned).is_contiguous()


def written(file: Path, text: str) -> Any:
    """A function that stands in a file."""
    file.write_text(text)
    space: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), space)
    return space["half"]


@pytest.mark.parametrize("files", [True, False], ids=["files", "archive"])
def test_an_operator_that_is_written_anew_has_another_name(tmp_path: Path, files: bool) -> None:
    texts = [f"def half(x, *_):\n    return x {what}\n" for what in ("/ 2", "* 0.5")]
    functions = [written(tmp_path / f"{n}.py", text) for n, text in enumerate(texts)]
    if not files:
        for n in range(len(texts)):
            (tmp_path / f"{n}.py").unlink()
    one, other = functions
    made = [
        register_operator("half", "(Tensor x) -> Tensor", function, one, *called)
        for function, called in [(one, []), (other, []), (one, [other])]
    ]
    assert len({str(operator) for operator in made[:2]}) == 2
    assert str(made[0]) != str(made[2])
    assert all(torch.equal(operator(torch.ones(2)), torch.full((2,), 0.5)) for operator in made)


@torch.no_grad()
def test_an_operator_is_looked_into_only_where_more_than_sizes_is_asked(tmp_path: Path) -> None:
    looked = []

    def third(x: torch.Tensor) -> torch.Tensor:
        looked.append(x)
        return x / 3

    operator = register_operator(
        "third", "(Tensor x) -> Tensor", third, lambda x: x.new_empty(x.shape)
    )
    with FakeTensorMode() as fakes:
        x = fakes.from_tensor(torch.ones(2, 5))
        assert operator(x).shape == x.shape
        assert not looked
        program = make_fx(operator)(x)
    assert looked
    assert "aten.div" in program.code
    assert "weir" not in program.code
