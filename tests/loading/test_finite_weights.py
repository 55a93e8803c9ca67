"""NaN and infinity in weights are found, whatever the dtype, the sign and the place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weir.errors import WeirError
from weir.loading import finite_weights
from weir.loading.finite_weights import check_finite, is_finite
from weir.native import block_weights
from weir.native.block_weights import Blocks, put

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NOT_FINITE = [float("nan"), -float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_numbers_that_are_not_finite_are_found(dtype, monkeypatch):
    monkeypatch.setattr(finite_weights, "CHUNK", 4)
    numbers = torch.finfo(dtype)
    held = torch.tensor([0.0, -0.0, numbers.max, numbers.min, numbers.tiny, 1.0, -1.0], dtype=dtype)
    assert is_finite(held)
    assert is_finite(held[:0])
    for value in NOT_FINITE:
        for at in range(len(held)):
            wrong = held.clone()
            wrong[at] = value
            assert not is_finite(wrong), (value, at)
            assert not is_finite(wrong.expand(2, -1).t()), "not contiguous"


def test_the_weights_are_named_and_masks_may_have_infinities():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("mask", torch.full((2,), -float("inf")), persistent=False)
    check_finite("a", model)
    with torch.no_grad():
        model[1].weight[0, 1] = float("nan")
        model[1].bias[0] = float("inf")
    with pytest.raises(WeirError, match=r"a cannot be used: its weight 1\.weight .*2 weights in"):
        check_finite("a", model)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "F16", "BF16"])
def test_blocks_are_looked_at_without_being_written_out(kind, monkeypatch):
    blocks = Blocks(kind, 32, 256)
    blocks.codes.zero_()
    blocks.scales.zero_()
    layer: Any = nn.Linear(256, 32, bias=False)
    put(layer, blocks)
    model = nn.Sequential(layer)
    monkeypatch.setattr(block_weights, "write_out", None)
    check_finite("a", model)
    held = layer.codes if kind.endswith("16") else layer.scales
    # The last number of the first panel. 0x7FFF is a NaN in float16 and in bfloat16.
    numbers = held.view(torch.int16) if held.dtype == torch.uint8 else held
    numbers.view(-1)[15] = 0x7FFF
    with pytest.raises(WeirError, match=r"its weight 0\.weight has numbers"):
        check_finite("a", model)
