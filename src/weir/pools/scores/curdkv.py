"""Keep large keys and values: statistical leverage, as CUR decompositions choose their rows.

CurDKV (Sengupta et al. 2025, "Value-Guided KV Compression for LLMs via Approximated CUR
Decomposition", arXiv:2509.15038), Algorithm 1: the leverage of rows of K and of V is approximated
by squared lengths. The product of both, each as a share of its neighborhood, ranks the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Bounds
from weir.pools.ranked import Ranked
from weir.pools.registry import pool
from weir.slab import Slots


@pool("curdkv")
@dataclass(frozen=True)
class CurDKV(Ranked):
    """Keep the tokens with the largest leverage, |k|^2 |v|^2, separately for each KV head.

    Attributes:
        n: number of tokens to keep.
        window: number of consecutive tokens, counted from the oldest on. Each squared length is
            divided by the sum over its window, so that no part of the stream outweighs all others.
            `none` for the sum over all tokens.
    """

    n: int
    window: Annotated[int, Bounds(2)] | None = 16

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the product of both shares [batch, kv_heads, slots], float64."""
        held = slots.held
        number = (held.cumsum(dim=2) - 1).clamp_min(0)
        window = number // self.window if self.window is not None else torch.zeros_like(number)
        keys, values = (
            _shares(t.double().square().sum(dim=-1).masked_fill(~held, 0.0), window)
            for t in (slots.keys, slots.values)
        )
        return keys * values


def _shares(size: Tensor, window: Tensor) -> Tensor:
    """Divide each size [batch, kv_heads, n] by the sum of its window; 0 / 0 is 0."""
    # On a GPU, the order of a sum is arbitrary. In double precision, it makes no difference that
    # could decide between equal tokens.
    total = torch.zeros_like(size).scatter_add_(2, window, size).gather(2, window)
    return (size / total).masked_fill(total == 0, 0.0)
