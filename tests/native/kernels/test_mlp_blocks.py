"""The kernel for an MLP with weights in blocks computes its three products and its gate."""

from __future__ import annotations

import pytest
import torch
from reference.blocks import blocks_of, random_lines, unit_of
from torch.nn import functional

from weir.errors import WeirError
from weir.native.block_formats import BLOCK, BLOCK_TYPES

kernel = pytest.importorskip("weir.native.kernels.mlp_blocks", reason="needs numba")
pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="needs VNNI or AVX2")
linear = pytest.importorskip("weir.native.kernels.linear_blocks").linear_blocks
INPUTS, WIDTH, OUTPUTS = 8 * BLOCK, 16 * BLOCK, 41


def gelu(x):
    return functional.gelu(x, approximate="tanh")


def weights(gate="Q8_0", up="Q8_0", down="Q8_0"):
    """Return weights of random codes, scaled so that the standard deviation of their numbers is
    near 1.
    """
    pytest.importorskip("gguf")
    sizes = (WIDTH, INPUTS, gate), (WIDTH, INPUTS, up), (OUTPUTS, WIDTH, down)
    made = []
    for seed, (outputs, inputs, kind) in enumerate(sizes):
        lines = random_lines(kind, outputs, inputs // unit_of(kind)[0], seed)
        blocks = blocks_of(lines, kind)
        half = blocks.scales[:, :, : BLOCK_TYPES[kind].heads]
        size = float(blocks.rows().std())
        if half.numel():
            half.copy_((half.view(torch.float16) / size).view(torch.int16))
        made.append((blocks.codes, blocks.scales, blocks.outputs, kind))
    return made


KINDS = [
    ("Q8_0", "Q8_0", "Q8_0"),
    ("Q4_1", "Q4_1", "Q8_0"),
    ("Q4_0", "Q8_0", "Q4_1"),
    ("Q4_K", "Q5_K", "Q6_K"),
    ("Q2_K", "IQ4_XS", "Q3_K"),
    ("F16", "Q8_0", "BF16"),
]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.thinned(3)
def test_it_is_three_products_and_a_gate(kinds, activation, dtype, threads):
    gate, up, down = weights(*kinds)
    act = functional.silu if activation == "silu" else gelu
    for rows in (64 * threads, 301):
        x = torch.randn(1, rows, INPUTS, generator=torch.Generator().manual_seed(rows)).to(dtype)
        found = kernel.mlp_blocks(x, gate, up, down, activation)
        assert found.dtype == dtype and found.shape == (1, rows, OUTPUTS)
        hidden = act(linear(x.float(), *gate)) * linear(x.float(), *up)
        wanted = linear(hidden, *down)
        # If a hidden number differs in its last place, it may be rounded to a neighboring one of
        # 127 steps.
        off = (found.float() - wanted).norm(dim=2) / wanted.norm(dim=2)
        assert off.max() < (2**-8 if dtype == torch.float32 else 2**-7)
        assert off.median() < (2**-12 if dtype == torch.float32 else 2**-8)


def test_few_rows_are_left_to_others(threads):
    assert kernel.mlp_blocks(torch.randn(64 * threads - 1, INPUTS), *weights(), "silu") is None


def test_weights_that_do_not_fit_together_are_refused():
    gate, up, down = weights()
    with pytest.raises(WeirError, match="do not fit together"):
        kernel.mlp_blocks(torch.randn(200, INPUTS), gate, down, down, "silu")
    with pytest.raises(WeirError, match="do not fit together"):
        kernel.mlp_blocks(torch.randn(200, INPUTS), gate, up, gate, "silu")
