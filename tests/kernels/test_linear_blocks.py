"""Products with weights in blocks: those of the rounded rows and what the codes stand for."""

from __future__ import annotations

import pytest
import torch
from roundings import close

from weir.models.block_weights import BLOCK, BLOCK_FORMATS, Blocks

kernel = pytest.importorskip("weir.kernels.cpu.linear_blocks", reason="needs numba")
pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="needs VNNI or AVX2")


def rounded(x):
    """Each block of a row in steps of a 127th of its largest number, as float32 rounds them."""
    found = x.float().clone()
    for row in found:
        for block in row.view(-1, BLOCK):
            most = block.abs().max()
            if most > 0:
                block.copy_((block * (127 / most)).round() * (most / 127))
    return found.double()


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_of_rounded_rows_and_what_codes_stand_for(kind, dtype):
    draw = torch.Generator().manual_seed(0)
    for outputs, blocks in ((1, 1), (16, 2), (17, 3), (40, 18), (63, 1)):
        weight = torch.randn(outputs, blocks * BLOCK, generator=draw)
        weight[outputs // 2, :BLOCK] = 0  # no step at all
        held = Blocks.quantize(weight, kind)
        numbers = held.rows().double()
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 21):
            x = torch.randn(rows, 1, blocks * BLOCK, generator=draw).to(dtype)
            x[rows // 2, 0, -BLOCK:] = 0
            found = kernel.linear_blocks(x, held.codes, held.scales, outputs)
            assert found.dtype == dtype and found.shape == (rows, 1, outputs)
            given = rounded(x[:, 0])
            wanted = given @ numbers.T
            # Where blocks have minima, these cancel against what codes add up to.
            size = given.abs() @ (2 * numbers.abs().amax(1, keepdim=True).expand_as(numbers)).T
            close(found[:, 0], wanted.to(torch.float64), 3 * blocks, size)


@pytest.mark.parametrize(("bits", "zero"), [(8, 128), (4, 8)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_codes_and_numbers_add_up_to_whole_sums(bits, zero, sign):
    """Where sums are of 16 bits in between, these are the most that they have to hold."""
    largest = (1 << bits) - 1
    codes = torch.tensor([[0] * BLOCK, [largest] * BLOCK, [0, largest] * (BLOCK // 2)])
    held = Blocks(codes.to(torch.uint8), torch.ones(3, 1, 1, dtype=torch.float16), bits)
    for rows in (1, 2, kernel.TOGETHER):
        found = kernel.linear_blocks(
            torch.full((rows, BLOCK), 127 * sign), held.codes, held.scales, 3
        )
        assert torch.equal(found, 127 * sign * (codes - zero).sum(1).float().expand(rows, -1))


def test_no_row_is_no_product():
    held = Blocks.quantize(torch.randn(16, BLOCK), "q8_0")
    assert kernel.linear_blocks(torch.empty(0, BLOCK), held.codes, held.scales, 16).shape == (0, 16)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize("rows", [13, 70, 301])
def test_a_row_is_the_same_alone_and_among_others(kind, rows, threads):
    """Few rows share the outputs among threads, many are shared themselves."""
    held = Blocks.quantize(torch.randn(403, 8 * BLOCK), kind)
    x = torch.randn(rows, 8 * BLOCK)
    together = kernel.linear_blocks(x, held.codes, held.scales, 403)
    alone = [kernel.linear_blocks(row, held.codes, held.scales, 403) for row in x]
    assert torch.equal(together, torch.stack(alone))
