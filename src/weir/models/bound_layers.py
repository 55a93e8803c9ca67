"""Compiled layers called without PyTorch's guards, while nothing they were traced from changes.

PyTorch evaluates hundreds of guards before each call of a compiled layer, and collects the tensors
of its program from modules one by one: in a small model that takes a fifth of a decode step. Here
both are done once. Where a call's inputs come from is recorded, and before each step all modules of
the layers are compared with what they held then, at once and by the identity of what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weir.models.interception import MethodPatch


class LayerSnapshot:
    """Snapshot of what the modules of some layers hold, and of PyTorch's settings.

    Attributes:
        tensors: all that they hold, by their `id`.

    Args:
        layers: with all modules below them.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = {module: None for layer in layers for module in layer.modules()}
        held: dict[int, dict[str, Any]] = {}
        for module in modules:
            attributes = vars(module)
            parts = [attributes, *(v for v in attributes.values() if isinstance(v, dict))]
            # A patch or a configuration may change under the same name.
            parts += [vars(v) for v in attributes.values() if isinstance(v, MethodPatch)]
            parts += [vars(v) for name, v in attributes.items() if name == "config"]
            held |= {id(part): part for part in parts}
        self._empty = [part for part in held.values() if not part]  # hooks, most of all
        self._live = [part for part in held.values() if part]
        self._then = [dict(part) for part in self._live]
        values = (value for part in self._then for value in part.values())
        self.tensors = {id(value): value for value in values if isinstance(value, Tensor)}
        self._modules = list(modules)
        self._kinds = _kinds(self._modules)
        self._read: list[Tensor] = []
        self._described: list[Any] = []
        self._settings = _settings()

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Notice from now on whether these get other memory, another type or another shape."""
        self._read += tensors
        self._described = _describe(self._read)

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        try:
            same = self._live == self._then and not any(self._empty)
        except (RuntimeError, ValueError):  # another tensor or array has no truth value
            return False
        same = same and _kinds(self._modules) == self._kinds
        # `model.to` gives the same tensor other numbers.
        return same and _settings() == self._settings and _describe(self._read) == self._described


def _kinds(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the classes of modules, and what these compute."""
    types: list[Any] = list(map(type, modules))
    return [*types, *(kind.forward for kind in dict.fromkeys(types))]


def _settings() -> tuple[Any, ...]:
    """Return what else decides how PyTorch computes."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


class ProgramCall:
    """One call of a compiled program: itself, its inputs and its outputs."""

    def __init__(self, program: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> None:
        self.program, self.inputs, self.outputs = program, inputs, outputs


class BoundLayer:
    """A layer's program, with the inputs that modules hold; it collects the others from a call.

    Attributes:
        constants: inputs that modules hold.

    Args:
        call: a call of the program, in a call of the layer.
        given: the arguments of the layer: tensors, tuples, objects whose method `tensors` lists
            what they hold, plain numbers and strings.
        output: what the layer returned.
        held: tensors that its modules hold, by their `id`.

    Raises:
        ValueError: an argument may change without being another, or it is not known where an input
            comes from or how the output is made.
    """

    def __init__(
        self, call: ProgramCall, given: Sequence[Any], output: Any, held: Mapping[int, Tensor]
    ) -> None:
        tensors, others, cached = _take_apart(given)
        if not all(value is None or isinstance(value, (bool, int, float, str)) for value in others):
            raise ValueError("an argument of unknown kind")
        self._others, self._layout = others, _layout(tensors)
        places = {id(t): at for at, t in enumerate(tensors + cached)}
        self._inputs: list[Any] = list(call.inputs)
        self._from_call: list[tuple[int, int]] = []
        for at, t in enumerate(self._inputs):
            if id(t) in places:
                self._from_call.append((at, places[id(t)]))
                self._inputs[at] = None
            elif id(t) not in held:
                raise ValueError("an input of unknown origin")
        self.constants = [t for t in self._inputs if t is not None]
        self._program = call.program
        outputs = {id(t): at for at, t in enumerate(call.outputs)}
        self._tuple = isinstance(output, tuple)
        returned = output if self._tuple else (output,)
        if any(t is not None and id(t) not in outputs for t in returned):
            raise ValueError("an output that the program does not return")
        self._returned = [None if t is None else outputs[id(t)] for t in returned]

    def __call__(self, given: Sequence[Any]) -> Any:
        """Return the layer's output; None where the arguments are of another kind than before."""
        tensors, others, cached = _take_apart(given)
        if others != self._others or _layout(tensors) != self._layout:
            return None
        inputs, tensors = self._inputs.copy(), tensors + cached
        for at, place in self._from_call:
            inputs[at] = tensors[place]
        outputs = self._program(*inputs)
        if not self._tuple:
            return outputs[self._returned[0]]
        return tuple(None if at is None else outputs[at] for at in self._returned)


def _take_apart(given: Sequence[Any]) -> tuple[list[Tensor], list[Any], list[Tensor]]:
    """Split arguments into their tensors, everything else, and the tensors of a cache, which has
    their sizes in its own.
    """
    tensors: list[Tensor] = []
    others: list[Any] = []
    cached: list[Tensor] = []
    for value in given:
        if isinstance(value, Tensor):
            tensors.append(value)
            others.append("tensor")
        elif isinstance(value, tuple):
            inner, more, below = _take_apart(value)
            tensors += inner
            others += ["tuple", len(value), *more]
            cached += below
        elif hasattr(value, "tensors"):
            cached += value.tensors()
            others.append("cache")
        else:
            others.append(value)
    return tensors, others, cached


def _describe(tensors: Sequence[Tensor]) -> list[Any]:
    return [(t.data_ptr(), t.dtype, t.shape) for t in tensors]


def _layout(tensors: Sequence[Tensor]) -> list[Any]:
    return [(t.shape, t.dtype, t.stride()) for t in tensors]
