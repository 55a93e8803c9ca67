"""The projection that a layer's attention goes through before it is added to the stream.

What a value adds to a layer's output is W_o v, not v: methods that judge tokens by their values
measure it there (CriticalKV, CAOTE, DefensiveKV). Finds W_o in the attention modules of the
families that weir serves; knows nothing about caches.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weir.models.quantized_weights import Int8Linear
from weir.slab import Heads

_NAMES = ("o_proj", "out_proj", "dense")
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights that are what they say; others (8 bits) need scales that lie elsewhere."""


class OutputProjection:
    """The output projection of one attention module, as a pool asks for it.

    Holds no model alive. What was worked out is kept, so that one cache does it once.

    Args:
        attention: a layer's attention module.
        heads: the sizes of its attention, of a model that is shared out this process's part.
    """

    def __init__(self, attention: nn.Module, heads: Heads) -> None:
        self._attention = weakref.ref(attention)
        self._heads = heads
        self._known: dict[torch.device, Tensor | None] = {}

    def __call__(self, value_dim: int, device: torch.device) -> Tensor | None:
        """Factors R with |R x| = |W_o x| of each query head's part W_o of the projection.

        Args:
            value_dim: numbers of a value.
            device: where they are wanted.

        Returns:
            [kv_heads, group, value_dim, value_dim], float32; None where the weights cannot be read:
            they are quantized, or wait elsewhere (offloaded), or this family calls them otherwise.
        """
        if device not in self._known:
            found = self._factors(value_dim)
            self._known[device] = None if found is None else found.to(device)
        return self._known[device]

    @torch.no_grad()
    def _factors(self, value_dim: int) -> Tensor | None:
        attention = self._attention()
        weight = None if attention is None else output_weight(attention)
        heads = self._heads.kv_heads * self._heads.group
        if weight is None or weight.shape[1] != heads * value_dim:
            return None
        # Of W = QR, Q keeps lengths. In float64: the same numbers wherever it is worked out.
        parts = weight.double().unflatten(1, (heads, value_dim)).transpose(0, 1)
        factor = torch.linalg.qr(parts, mode="r").R
        whole = factor.new_zeros(heads, value_dim, value_dim)
        whole[:, : factor.shape[1]] = factor
        return whole.float().unflatten(0, (self._heads.kv_heads, self._heads.group))


def output_weight(attention: nn.Module) -> Tensor | None:
    """W_o of an attention module [hidden, heads * value_dim]; None where it cannot be read.

    Of a module that an adapter was put into (PEFT) it is the weight below the adapter; of one whose
    heads are shared out over processes (`tp_plan`), this one's columns.
    """
    projection: Any = next((getattr(attention, n) for n in _NAMES if hasattr(attention, n)), None)
    projection = getattr(projection, "base_layer", projection)
    if not isinstance(projection, nn.Linear):
        return None
    found: Any = projection.weight
    if isinstance(projection, Int8Linear):
        found = found.dequantize()
    elif is_traceable_wrapper_subclass(found) and not hasattr(found, "device_mesh"):
        return None  # torchao's dtype is that of what a weight would be dense
    weight: Tensor = found.to_local() if hasattr(found, "device_mesh") else found
    if weight.is_meta or weight.dtype not in _PLAIN:
        return None
    return weight.detach()
