"""Tries modules on random numbers to find out what they compute.

A name proves nothing, because a subclass, a patch or another release may compute something else
under the same name. So a copy of a module is called on several rows of random numbers of several
sizes, with stand-ins for its large weights, and its answers are compared with a formula in float64.
A difference larger than float32 rounding means that the module computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SIZES = (30.0, 3.0, 1.0, 0.1, 1e-3)
"""Sizes of the numbers that modules are tried on: from the large ones that attention sinks have,
down to numbers so small that the epsilon of a norm makes a difference.
"""
_EPS = torch.finfo(torch.float32).eps
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
}
"""Activations that kernels support, with functions that a program cannot replace afterwards."""


def copy_module(module: Any, parts: Mapping[int, nn.Module] | None = None) -> Any:
    """Return a copy of a module with float32 parameters, which can be called with trial numbers.

    Attributes are shared. The copy has its class's forward, and no patches.

    Args:
        module: any module that has few parameters itself.
        parts: replacements for modules below it, by their `id`; other modules are copied, too.
    """
    found = object.__new__(type(module))
    vars(found).update(vars(module))
    vars(found).pop("forward", None)
    vars(found)["_parameters"] = {
        name: None if held is None else nn.Parameter(held.detach().float(), requires_grad=False)
        for name, held in module._parameters.items()
    }
    vars(found)["_buffers"] = dict(module._buffers)
    vars(found)["_modules"] = {
        name: part if part is None else (parts or {}).get(id(part)) or copy_module(part, parts)
        for name, part in module._modules.items()
    }
    return found


def trial_rows(width: int, epsilon: float | None = None) -> Tensor:
    """Return rows of random numbers [rows, width], float32, of many sizes and with a mean that is
    not zero.

    Args:
        width: of a row.
        epsilon: the epsilon of a norm; one row is so small that the squares of its numbers are
            about as large as epsilon.
    """
    draw = torch.Generator().manual_seed(width)
    sizes = torch.tensor([*_SIZES, 1e-3 if epsilon is None else max(epsilon, 1e-30) ** 0.5])
    return (torch.randn(len(sizes), width, generator=draw) + 0.5) * sizes[:, None]


def is_rounding(got: Tensor, wanted: Tensor, terms: int) -> bool:
    """Return whether numbers [rows, ...] differ from others by no more than float32 rounding.

    A layer rounds a number about 32 times, and a sum of n terms is off by up to `4 eps sqrt(n)` of
    its size. The bound is relative to the largest number of a row.
    """
    if got.shape != wanted.shape or not bool(got.isfinite().all()):
        return False
    off = (got.double() - wanted.double()).abs().flatten(1).amax(1)
    size = wanted.double().abs().flatten(1).amax(1)
    return bool((off <= _EPS * (32 + 4 * terms**0.5) * size).all())


def activation_of(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Try an activation, and return the name that kernels use for it; None if kernels do not
    support it.
    """
    x = torch.linspace(-30, 30, 1201)
    with torch.no_grad():
        answer = activation(x.clone()).double()
    wide = x.double()
    for known, made in _ACTIVATIONS.items():
        if bool(((answer - made(wide)).abs() <= 8 * _EPS * wide.abs()).all()):
            return known
    return None


def activate(name: str, x: Tensor) -> Tensor:
    """Compute an activation, given the name that kernels use for it."""
    return _ACTIVATIONS[name](x)


class StandIn(nn.Module):
    """A stand-in for a linear layer: each output is a multiple of one input, plus a bias if the
    layer has one.

    It is linear, differs from every other stand-in, and is cheap, so it shows what a layer does
    with its projections without their weights.
    """

    def __init__(self, module: nn.Linear, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        outputs, self.in_features = module.out_features, module.in_features
        self.out_features = outputs
        places = torch.randint(self.in_features, (outputs,), generator=draw)
        some = min(outputs, self.in_features)
        places[:some] = torch.randperm(self.in_features, generator=draw)[:some]
        self._places = places[torch.randperm(outputs, generator=draw)]
        self._factors = torch.rand(outputs, generator=draw) + 0.5
        self._factors *= torch.randint(2, (outputs,), generator=draw) * 2 - 1
        self.weight, self.bias = torch.empty(0), None
        self._added = None
        if module.bias is not None:
            self._added = torch.randn(outputs, generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        """Pick inputs and multiply them: [..., in_features] to [..., out_features]."""
        out = x[..., self._places] * self._factors.to(x.dtype)
        return out if self._added is None else out + self._added.to(x.dtype)


def is_gated_mlp(module: Any) -> bool:
    """Return whether a module computes `down_proj(act_fn(gate_proj(x)) * up_proj(x))`.

    The module's own hooks are not called, because they run around its forward even if a kernel
    replaces the forward.
    """
    layers = [module.gate_proj, module.up_proj, module.down_proj]
    activation = activation_of(module.act_fn)
    if activation is None or len({id(layer) for layer in layers}) < len(layers):
        return False
    gate, up, down = stand_ins = [StandIn(layer, seed) for seed, layer in enumerate(layers)]
    parts = {id(layer): part for layer, part in zip(layers, stand_ins, strict=True)}
    x = trial_rows(gate.in_features)
    try:
        with torch.no_grad():
            answer = copy_module(module, parts).forward(x)
    except Exception:  # whatever others' modules raise when they are tried
        return False
    wide = x.double()
    wanted = down(activate(activation, gate(wide)) * up(wide))
    return is_rounding(answer, wanted, gate.in_features)
