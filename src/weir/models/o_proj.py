"""Output projection of attention (`o_proj`), for pools that score tokens by their values.

Its weight is W_o. Attention that reads a token with the value v adds a multiple of W_o v to the
layer's output. The pools `critical`, `defend` and `tail` compute scores from the size of W_o v. The
pools `match` and `residue` use W_o, too: they compare answers of attention by their effect on the
output.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weir.models.few_bits import FewBits
from weir.slab import Heads

_NAMES = ("o_proj", "out_proj", "dense")
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose numbers are the weights themselves; others (8 bits) need scales that are stored
elsewhere.
"""


class OutputProjection:
    """The output projection of one attention module, for a pool.

    This object does not keep the model alive. The factors that a call returns are computed once for
    each device, and cached.

    Args:
        attention: the module.
        heads: the number and the sizes of its heads.
        kept: the KV heads whose parts of the projection are returned; None for all.
    """

    def __init__(
        self, attention: nn.Module, heads: Heads, kept: tuple[int, ...] | None = None
    ) -> None:
        self._attention = weakref.ref(attention)
        self._heads = heads
        self._kept = slice(None) if kept is None else list(kept)
        self._known: dict[torch.device, Tensor | None] = {}

    def __call__(self, value_dim: int, device: torch.device) -> Tensor | None:
        """Return factors R with |R x| = |W_o x|, where W_o is the part of the projection that
        belongs to a query head.

        Their shape is [kv_heads, group, value_dim, value_dim], float32. Returns None if the weights
        cannot be read: the model no longer exists, its attention has no linear layer with one of
        the names in `_NAMES`, the weights are offloaded or quantized in a form that `output_weight`
        does not support, or they have another size than the heads.
        """
        if device not in self._known:
            found = self._factors(value_dim)
            self._known[device] = None if found is None else found.to(device)
        return self._known[device]

    def parts(self, value_dim: int, device: torch.device) -> Tensor | None:
        """Return W_o of each query head [kv_heads, group, hidden, value_dim]; None if the weights
        cannot be read or have another size than the heads.
        """
        attention = self._attention()
        weight = None if attention is None else output_weight(attention)
        sizes = self._heads.kv_heads, self._heads.group, value_dim
        if weight is None or weight.shape[1] != math.prod(sizes):
            return None
        return weight.to(device).unflatten(1, sizes).movedim(0, 2)[self._kept]

    def of_heads(self, heads: tuple[int, ...]) -> OutputProjection | None:
        """Return the projection of only some KV heads; None if the module no longer exists."""
        attention = self._attention()
        return None if attention is None else OutputProjection(attention, self._heads, heads)

    @torch.no_grad()
    def _factors(self, value_dim: int) -> Tensor | None:
        parts = self.parts(value_dim, torch.device("cpu"))
        if parts is None:
            return None
        # In W = QR, Q preserves lengths. The factors are computed on the CPU, in float64, so that
        # they do not depend on the model's device.
        factor = torch.linalg.qr(parts.double(), mode="r").R
        whole = factor.new_zeros(*parts.shape[:2], value_dim, value_dim)
        whole[:, :, : factor.shape[2]] = factor
        return whole.float()


def output_weight(attention: nn.Module) -> Tensor | None:
    """Return W_o of an attention module [hidden, heads * value_dim]; None if it cannot be read.

    With a PEFT adapter, it is the weight of the base layer; with a `tp_plan`, this process's
    columns.
    """
    projection: Any = next((getattr(attention, n) for n in _NAMES if hasattr(attention, n)), None)
    projection = getattr(projection, "base_layer", projection)
    if not isinstance(projection, nn.Linear):
        return None
    found: Any = projection.weight
    if isinstance(projection, FewBits):
        found = projection.dequantized()
    elif is_traceable_wrapper_subclass(found) and not hasattr(found, "device_mesh"):
        return None  # the check below would not notice it: torchao reports a plain dtype
    weight: Tensor = found.to_local() if hasattr(found, "device_mesh") else found
    if weight.is_meta or weight.dtype not in _PLAIN:
        return None
    return weight.detach()
