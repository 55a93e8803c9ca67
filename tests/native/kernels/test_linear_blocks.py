"""Products with weights in blocks are the products of the rounded rows and the numbers that the
codes stand for.
"""

from __future__ import annotations

import pytest
import torch
from reference.blocks import blocks_of, dequantized, random_lines, rounded
from roundings import close

from weir.native.block_formats import BLOCK, BLOCK_TYPES
from weir.native.block_types import Parts
from weir.native.block_weights import Blocks

kernel = pytest.importorskip("weir.native.kernels.linear_blocks", reason="needs numba")
pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="needs VNNI or AVX2")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.thinned(2)
def test_products_are_of_rounded_rows_and_what_codes_stand_for(kind, dtype):
    """Compare with the numbers that the package `gguf` computes, in float64."""
    pytest.importorskip("gguf")
    draw = torch.Generator().manual_seed(0)
    for outputs, units in ((1, 1), (16, 2), (17, 3), (40, 18), (63, 1)):
        units = min(units, 4) if BLOCK_TYPES[kind].shared else units
        lines = random_lines(kind, outputs, units, seed=outputs)
        numbers, held = dequantized(lines, kind).double(), blocks_of(lines, kind)
        inputs = numbers.shape[1]
        least = torch.zeros_like(numbers)
        if BLOCK_TYPES[kind].minima:
            # Minima and the sums of codes cancel each other, so the bound needs the size of both.
            least = numbers.unflatten(1, (-1, BLOCK)).abs().amax(2, keepdim=True)
            least = least.expand(-1, -1, BLOCK).flatten(1)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 21):
            x = torch.randn(rows, 1, inputs, generator=draw).to(dtype)
            x[rows // 2, 0, -BLOCK:] = 0
            found = kernel.linear_blocks(x, held.codes, held.scales, outputs, kind)
            assert found.dtype == dtype and found.shape == (rows, 1, outputs)
            given = x[:, 0].double() if BLOCK_TYPES[kind].number else rounded(x[:, 0])
            wanted = given @ numbers.T
            size = given.abs() @ (numbers.abs() + least).T
            terms = inputs if BLOCK_TYPES[kind].number else 3 * inputs // BLOCK
            close(found[:, 0], wanted.to(torch.float64), terms, size)


@pytest.mark.parametrize("kind", [kind for kind, form in BLOCK_TYPES.items() if not form.number])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_codes_and_numbers_add_up_to_whole_sums(kind, sign):
    """If intermediate sums have 16 bits, these are the largest sums that they must hold."""
    form = BLOCK_TYPES[kind]
    inputs, largest = BLOCK * form.unit_blocks, len(form.values) - 1
    codes = torch.tensor([[0] * inputs, [largest] * inputs, [0, largest] * (inputs // 2)])
    heads = torch.zeros(3, 1, form.heads, dtype=torch.float16)
    heads[..., 0] = 1
    factors = torch.ones(3, form.unit_blocks, form.factors, dtype=torch.uint8)
    held = Blocks(kind, 3, inputs)
    held.put(0, Parts(codes.to(torch.uint8), heads, factors if form.shared else None))
    meant = (torch.tensor(form.values)[codes] - form.zero).sum(1).float() * form.unit
    for rows in (1, 2, kernel.TOGETHER):
        x = torch.full((rows, inputs), 127 * sign)
        found = kernel.linear_blocks(x, held.codes, held.scales, 3, kind)
        assert torch.equal(found, 127 * sign * meant.expand(rows, -1))


def test_no_row_is_no_product():
    held = Blocks.quantize(torch.randn(16, BLOCK), "q8_0")
    none = torch.empty(0, BLOCK)
    assert kernel.linear_blocks(none, held.codes, held.scales, 16, "Q8_0").shape == (0, 16)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS", "F16"])
@pytest.mark.parametrize("rows", [13, 70, 301])
def test_a_row_is_the_same_alone_and_among_others(kind, rows, threads):
    """For few rows, the outputs are divided among threads; for many, the rows are."""
    pytest.importorskip("gguf")
    units = 1 if BLOCK_TYPES[kind].shared else 8
    held = blocks_of(random_lines(kind, 403, units), kind)
    x = torch.randn(rows, 8 * BLOCK)
    together = kernel.linear_blocks(x, held.codes, held.scales, 403, kind)
    alone = [kernel.linear_blocks(row, held.codes, held.scales, 403, kind) for row in x]
    assert torch.equal(together, torch.stack(alone))
