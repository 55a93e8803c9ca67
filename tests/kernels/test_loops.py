"""What compiled steps are written with."""

from __future__ import annotations

from pathlib import Path

import torch
from roundings import close
from torch import Tensor

from weir.kernels import as_one, dots


def test_an_operator_that_is_written_anew_has_another_name(tmp_path: Path) -> None:
    def half(x: Tensor) -> Tensor:
        return x / 2

    made = []
    for text in ("x / 2", "x * 0.5"):
        file = tmp_path / "written.py"
        file.write_text(text)
        made.append(as_one("half", "(Tensor x) -> Tensor", half, str(file)))
    assert len({str(operator) for operator in made}) == 2
    assert all(torch.equal(operator(torch.ones(2)), torch.full((2,), 0.5)) for operator in made)


def test_products_are_those_of_the_library() -> None:
    drawn = torch.Generator().manual_seed(0)
    rows, lines = (torch.randn(2, n, 24, generator=drawn) for n in (3, 40))
    close(dots(rows, lines), rows @ lines.transpose(1, 2), 24)
