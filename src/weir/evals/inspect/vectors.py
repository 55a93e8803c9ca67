"""What a layer's attention compares: queries and keys where they stand in the text, or turned back.

Rotary embedding turns queries and keys by angles that grow with their places. Most models do so
before weir gets them, and some leave it to weir; here both look alike. Knows nothing about what is
measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weir.evals.attention_error import Captured


def as_read(it: Captured, x: Tensor) -> Tensor:
    """Queries or keys of a layer as its attention reads them, at their places in the text.

    That is how transformers caches keys, and how the pools `kcenter`, `subgen` and `balance`
    compare them.

    Args:
        it: the layer; its first token stands at place 0.
        x: `it.queries` or `it.keys` [1, heads, length, key_dim].
    """
    rotary = it.positions.rotary
    if rotary is None or it.positions.placed:
        return x
    return rotary.rotate(x, _places(x))


def turned_back(it: Captured) -> Tensor | None:
    """The keys of a layer as if all stood at place 0 [1, kv_heads, length, key_dim].

    None for a layer that rotates nothing: its keys stand nowhere.
    """
    rotary = it.positions.rotary
    if rotary is None:
        return None
    return rotary.move(as_read(it, it.keys), -_places(it.keys))


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)[None, None]
