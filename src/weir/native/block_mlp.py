"""Runs an MLP whose weights are in blocks as one kernel, for the many rows of a prompt.

If the three products, the activation and the multiplication between them run separately, four
intermediate results of the whole prompt are written to memory and read again. The kernel
(`native.kernels.mlp_blocks`) instead takes a few rows at a time through the whole MLP. A module is
recognized by the names of its layers. Whether it computes what the names say is tested by calling
it (`module_trials`), and the kernel's answers are compared with the module's on a few rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weir.models import MethodPatch, has_class_forward, has_hooks
from weir.native import dispatch
from weir.native.block_weights import BlockLinear
from weir.native.dispatch import BlockWeight
from weir.native.module_trials import is_gated_mlp

ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu"}
"""Activations that kernels know, by the names of their classes."""
PROBES = 8
"""Number of rows on which kernel and module are compared, once for a set of weights."""
ROUNDED = 2**-5
"""Largest difference between the answers of kernel and module, relative to the module's answer. The
intermediate results differ by float32 or bfloat16 rounding. Then they are rounded to 8 bits for the
last product, and some of them to different 8-bit steps.
"""
_LAYERS = ("gate_proj", "up_proj", "down_proj")


def run_mlps_whole(model: nn.Module) -> None:
    """Let the kernel run those MLPs of a model that the kernel supports."""
    for module in model.modules():
        if _weights_of(module) is not None and has_class_forward(module):
            # A copy of a patched module has its class's forward as an attribute.
            vars(module).pop("forward", None)
            MethodPatch(module, "forward", _WholeMLP(module))


class _WholeMLP:
    """Runs an MLP by the kernel if possible, otherwise by the module's own forward.

    Args:
        module: the MLP.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._proved: list[Tensor] = []
        self._refused = False

    def __call__(self, own: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Return what `own` returns for hidden states [..., width]."""
        if self._refused or torch.compiler.is_compiling():
            return own(x)
        kernel, weights = dispatch.mlp_blocks(x), _weights_of(self._module)
        if kernel is None or weights is None:
            return own(x)
        gate, up, down = weights
        found = kernel(x, gate, up, down, ACTIVATIONS[type(self._module.act_fn).__name__])
        if found is None:
            return own(x)
        codes = [weight[0] for weight in weights]
        if not self._proved or not all(map(operator.is_, codes, self._proved)):
            some, answers = (t.flatten(0, -2)[:PROBES] for t in (x, found))
            same = is_gated_mlp(self._module) and is_near(answers, own(some), ROUNDED)
            self._refused = not same
            self._proved = codes
        return own(x) if self._refused else found


def _weights_of(module: Any) -> list[BlockWeight] | None:
    """Return the weights of gate, up and down; None if the kernel cannot run the module."""
    layers: list[Any] = [getattr(module, name, None) for name in _LAYERS]
    activation = getattr(module, "act_fn", None)
    if type(activation).__name__ not in ACTIVATIONS or _is_hooked(activation):
        return None
    if not all(type(layer) is BlockLinear and _is_bare(layer) for layer in layers):
        return None
    gate, up, down = layers
    alike = gate.in_features == up.in_features
    if not alike or not gate.out_features == up.out_features == down.in_features:
        return None
    return [(layer.codes, layer.scales, layer.out_features, layer.kind) for layer in layers]


def _is_bare(layer: BlockLinear) -> bool:
    """Return whether a layer only multiplies, on the CPU."""
    here = layer.bias is None and layer.codes.is_cpu
    return here and not _is_hooked(layer) and has_class_forward(layer)


def _is_hooked(module: Any) -> bool:
    return has_hooks(module._forward_hooks, module._forward_pre_hooks)


def is_near(one: Tensor, other: Tensor, off: float) -> bool:
    """Return whether `one` differs from `other` by at most `off` times the norm of `other`."""
    return bool((one.float() - other.float()).norm() <= off * other.float().norm())
