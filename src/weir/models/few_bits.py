"""Interface of layers whose weights are stored with few bits, for code that reads weights."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class FewBits(Protocol):
    """A layer whose weight is rounded to few bits; `weir.native` has several."""

    def dequantized(self) -> Tensor:
        """Return the dequantized weight [outputs, inputs], in the model's dtype."""


def has_few_bits(model: nn.Module) -> bool:
    """Return whether any weight of a model is rounded to few bits."""
    return any(isinstance(module, FewBits) for module in model.modules())
