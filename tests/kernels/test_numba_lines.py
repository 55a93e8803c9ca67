"""Lines of numbers that kernels read and write where they lie."""

from __future__ import annotations

import pytest
import torch

from weir.errors import WeirError

tools = pytest.importorskip("weir.kernels.numba_tools", reason="numba is not installed")


@pytest.mark.parametrize("written", [False, True])
def test_lines_are_found_in_the_memory_they_lie_in(written):
    held = torch.arange(2 * 3 * 9 * 5, dtype=torch.float32).view(2, 3, 9, 5)
    parts = held[:, 1:, 2:7], held[..., 3:4], held[:1, :, 8:], held.transpose(1, 2)
    for part in parts:  # of a part of one number a line, the next is that of another line
        memory, steps = tools.in_lines(part, written=written)
        assert memory.__array_interface__["data"][0] == part.data_ptr()
        place = sum((n - 1) * step for n, step in zip(part.shape, steps, strict=False))
        assert memory[place : place + part.shape[3]].tolist() == part[-1, -1, -1].tolist()


def test_what_would_be_written_to_a_copy_is_refused():
    turned = torch.zeros(1, 1, 4, 3).mT
    with pytest.raises(WeirError, match="side by side"):
        tools.in_lines(turned, written=True)
    memory, steps = tools.in_lines(turned)
    assert steps == (12, 12, 4) and memory.shape == (12,)
