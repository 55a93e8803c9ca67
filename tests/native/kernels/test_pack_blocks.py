"""The kernel that packs the lines of a file into panels returns byte for byte what the PyTorch
version does.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference.blocks import random_lines, unit_of

from weir.native.block_formats import BLOCK_TYPES
from weir.native.block_types import take_apart
from weir.native.block_weights import Blocks

kernel = pytest.importorskip("weir.native.kernels.pack_blocks", reason="needs numba")
pytest.importorskip("gguf")


def packed(kind: str, lines: np.ndarray) -> tuple[Blocks, Blocks]:
    """Pack lines by the kernel, and by the PyTorch version."""
    numbers, size = unit_of(kind)
    sizes = kind, len(lines), lines.shape[1] // size * numbers
    found, wanted = Blocks(*sizes), Blocks(*sizes)
    wanted.put(0, take_apart(torch.from_numpy(np.ascontiguousarray(lines)), kind))

    assert kernel.pack_blocks(kind, lines, found.codes, found.scales, 0)
    return found, wanted


@pytest.mark.parametrize("kind", kernel.KINDS)
def test_panels_are_those_of_the_reference(kind: str, threads: int) -> None:
    for outputs, units in ((1, 1), (75, 3), (16, 2)):
        found, wanted = packed(kind, random_lines(kind, outputs, units, seed=outputs))
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scales, wanted.scales)


def test_lines_may_lie_apart_or_in_another_order() -> None:
    lines = random_lines("Q4_K", 80, 2)
    for view in (lines[::2], lines[::-1], lines[np.random.default_rng(0).permutation(80)]):
        found, wanted = packed("Q4_K", view)
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scales, wanted.scales)


def test_other_types_are_left_to_the_reference() -> None:
    kind = next(kind for kind in BLOCK_TYPES if kind not in kernel.KINDS)
    blocks = Blocks(kind, 16, 256)
    lines = random_lines(kind, 16, 1)
    assert not kernel.pack_blocks(kind, lines, blocks.codes, blocks.scales, 0)
