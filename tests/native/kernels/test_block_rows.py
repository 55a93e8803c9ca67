"""The kernel that reads rows of weights in blocks returns bit for bit what the PyTorch version
does.
"""

from __future__ import annotations

import pytest
import torch
from reference.blocks import blocks_of, random_lines, unit_of

from weir.native.block_formats import BLOCK_TYPES
from weir.native.block_weights import Blocks, write_out

kernel = pytest.importorskip("weir.native.kernels.block_rows", reason="needs numba")
pytest.importorskip("gguf")
if not kernel.SUPPORTED:
    pytest.skip("needs a processor that reads float16", allow_module_level=True)


def held(kind: str, outputs: int, inputs: int) -> Blocks:
    """Return a weight of random blocks, in the layout that they have in memory."""
    units = inputs // unit_of(kind)[0]
    return blocks_of(random_lines(kind, outputs, units, seed=outputs), kind)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_rows_are_those_of_the_reference_to_the_bit(kind: str) -> None:
    for outputs, inputs in ((75, 768), (1, 256), (32, 512)):
        weight = held(kind, outputs, inputs)
        which = torch.tensor([0, outputs - 1, outputs // 2, 0, min(17, outputs - 1)])
        given = weight.codes, weight.scales

        found = kernel.block_rows(which, *given, outputs, kind)

        wanted = write_out(*given, kind, outputs, which)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
        assert torch.equal(found, weight.rows()[which])


def test_a_row_that_is_not_there_is_not_read() -> None:
    weight = held("Q4_0", 20, 64)
    for wrong in (-1, 20, 31, 2**40):  # the last panel has places for 32
        which = torch.tensor([3, wrong])
        assert kernel.block_rows(which, weight.codes, weight.scales, 20, "Q4_0") is None


def test_no_rows_are_none() -> None:
    weight = held("Q6_K", 16, 256)
    none = torch.empty(0, dtype=torch.int64)
    assert kernel.block_rows(none, weight.codes, weight.scales, 16, "Q6_K").shape == (0, 256)


def test_rows_may_be_named_apart() -> None:
    weight = held("Q5_K", 40, 256)
    which = torch.arange(40)[::3]
    found = kernel.block_rows(which, weight.codes, weight.scales, 40, "Q5_K")
    assert torch.equal(found, weight.rows()[::3])
