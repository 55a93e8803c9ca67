"""A prompt that a layer reads whole, with its answers computed or left out."""

from __future__ import annotations

import pytest
import torch

from weir.cache.layer import Layer, LayerSpec
from weir.policies.grammar import policy
from weir.slab import AttentionParams


@pytest.mark.parametrize("text", ["recent(9)", "sink(2) | recent(4) | heavy(6)", "snap(16, 4, 5)"])
def test_a_prompt_that_nobody_asks_is_held_as_one_that_is_answered(text: str) -> None:
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 4, 300, 8, generator=draw)
    keys, values = (torch.randn(1, 2, 300, dim, generator=draw) for dim in (8, 5))
    layers = [Layer(LayerSpec(policy(text), chunk=8)) for _ in range(2)]
    answered, silent = (
        layer.feed(queries, keys, values, AttentionParams(0.4), prefill=True, answers=answers)
        for layer, answers in zip(layers, (True, False), strict=True)
    )
    assert answered.shape == silent.shape == (1, 4, 300, 5)
    assert bool(answered.any()) and not silent.any()
    one, other = (layer.state.slab for layer in layers)
    assert layers[0].state.lengths == layers[1].state.lengths
    for name in ("keys", "values", "a", "b", "position"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    # The next tokens get the same answers from both layers, even with answers=False.
    more = (t[:, :, :3] for t in (queries, keys, values))
    first, second = (
        layer.feed(*part, AttentionParams(0.4), seen=300, answers=answers)
        for layer, part, answers in zip(layers, [tuple(more)] * 2, (True, False), strict=True)
    )
    assert torch.equal(first, second)
