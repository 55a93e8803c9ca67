"""Notices when a model's rotary embedding has changed since a cache was made.

The slots of a cache hold keys that were rotated by the embedding at that time, and the cache
rotates them again with a copy of its frequencies. If the embedding changes, the keys and the copy
no longer fit the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.models.interception import has_hooks
from weir.slab import Rotary

_BY_LENGTH = ("longrope", "dynamic")
"""Kinds of embeddings that change their own frequencies with the length of a call."""

_TRIED = (0, 1, 2, 3, 7)
"""Positions at which an embedding is compared with weir's."""
_FAR = (0, 1, 2, 3, 7, 1000, 100_000)
"""Positions that hooks are tried with."""


class RotaryWatch:
    """The rotary embedding of a model, as it is when this object is made.

    Args:
        model: the causal language model.
        rotations: weir's replacements for the embedding, by layer type.

    Raises WeirError if the embedding and weir's replacements compute different rotations, or if a
    hook changes the embedding's positions other than by adding the same number to all of them.
    """

    def __init__(self, model: PreTrainedModel, rotations: Mapping[str | None, Rotary]) -> None:
        self._module = rotary_of(model)
        self._in_decoder = model.get_decoder() is model.base_model
        if self._module is not None:
            _try(self._module, rotations)
            _try_hooks(self._module, rotations)
        self._values: list[Any] = []
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        if self._module is not None:
            self._take(*_read(self._module))

    def find(self, model: PreTrainedModel, decoder: nn.Module) -> nn.Module | None:
        """Return the model's current rotary embedding, as `rotary_of` does.

        It is read from `decoder` if that was the model's decoder when this object was made.

        Args:
            model: the model.
            decoder: the model's `base_model`, which has the hooks of caches.
        """
        return getattr(decoder, "rotary_emb", None) if self._in_decoder else rotary_of(model)

    def check(self, module: nn.Module | None) -> None:
        """Raise a WeirError if the model's current rotary embedding, `module`, differs from the one
        that the model had when this object was made.
        """
        if module is None or self._module is None:
            return
        if _hooks(module) != self._hooks:
            raise WeirError(
                "the hooks on the rotary embedding of this model have changed since this cache "
                "was made, and the keys in the cache were rotated without the change. Restore the "
                "hooks, or make a new cache."
            )
        tensors, numbers = _read(module)
        if module is self._module and numbers == self._numbers and self._are_the_same(tensors):
            return
        equal = numbers == self._numbers and len(tensors) == len(self._values)
        if not equal or not all(map(_equal, tensors, self._values)):
            raise WeirError(
                "the rotary embedding of this model has changed since this cache was made, and "
                "the keys in the cache were rotated by the old one. Undo the change, or make a "
                "new cache."
            )
        self._module = module
        self._take(tensors, numbers)

    def _take(self, tensors: list[Tensor], numbers: list[Any]) -> None:
        self._tensors, self._numbers = tensors, numbers
        self._hooks = _hooks(self._module)
        self._values = [tensor.detach().clone() for tensor in tensors]
        self._versions = list(map(_version, tensors))

    def _are_the_same(self, tensors: list[Tensor]) -> bool:
        """Return whether the tensors are unchanged, without waiting for a GPU."""
        if len(tensors) != len(self._tensors):
            return False
        for now, then, version, value in zip(
            tensors, self._tensors, self._versions, self._values, strict=True
        ):
            if now is not then:
                return False
            # Writing through `.data` or NumPy does not change a tensor's version.
            if not (_equal(now, value) if now.is_cpu else _version(now) == version):
                return False
        return True


def rotary_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that rotates the keys of a model's text; None if there is none."""
    found: nn.Module | None = getattr(model.get_decoder(), "rotary_emb", None)
    return found


def _try(module: Any, rotations: Mapping[str | None, Rotary]) -> None:
    """Compare a rotary embedding with weir's at a few positions; WeirError if they differ."""
    kinds = getattr(module, "rope_type", "default")
    for name, rotary in rotations.items():
        kind = kinds.get(name) if isinstance(kinds, dict) else kinds
        if kind in _BY_LENGTH or rotary.sections is not None or rotary.frequencies.is_meta:
            continue
        # Modules compute in float32 and answer in the dtype of x, whatever PyTorch's defaults are.
        device = rotary.frequencies.device
        places = torch.tensor([_TRIED], dtype=torch.int64, device=device)
        more = {"layer_type": name} if isinstance(kinds, dict) else {}
        x = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
        with torch.no_grad():
            tables = torch.stack(module.forward(x, position_ids=places, **more))
            ours = torch.stack(rotary.tables(places, tables.shape[-1]))
        # The module rounds frequencies, angles and cosines to float32.
        largest = 1 + max(_TRIED) * float(rotary.frequencies.abs().max())
        if (tables - ours).abs().max() > 2**-21 * largest * abs(rotary.scaling):
            raise WeirError(
                f"the rotary embedding of this model, a {type(module).__name__}, computes other "
                "cosines and sines than those of its frequencies, but weir uses those of its "
                "frequencies. Change inv_freq or attention_scaling instead of the forward."
            )


def _try_hooks(module: Any, rotations: Mapping[str | None, Rotary]) -> None:
    """Refuse hooks that change the positions that the module is given (WeirError), because weir
    uses its own positions, and the hooks would have no effect. Hooks that add the same number to
    all positions are allowed.
    """
    hooks = {
        number: hook
        for number, hook in module._forward_pre_hooks.items()
        if has_hooks({number: hook})
    }
    if not hooks or any(rotary.sections is not None for rotary in rotations.values()):
        return
    device = next((rotary.frequencies.device for rotary in rotations.values()), None)
    places = torch.tensor([_FAR], dtype=torch.int64, device=device)
    given: tuple[Any, ...] = (torch.zeros(1, 1, 1, dtype=torch.float32, device=device),)
    named: dict[str, Any] = {"position_ids": places.clone()}
    for number, hook in hooks.items():
        if number in module._forward_pre_hooks_with_kwargs:
            given, named = hook(module, given, named) or (given, named)
        else:
            changed = hook(module, given)
            given = given if changed is None else changed
            given = given if isinstance(given, tuple) else (given,)
    found = named.get("position_ids", given[1] if len(given) > 1 else None)
    moved = None if not isinstance(found, Tensor) or found.shape != places.shape else found - places
    if moved is None or (moved != moved[0, 0]).any():
        raise WeirError(
            "a forward pre-hook on the rotary embedding of this model changes positions, but weir "
            "uses its own positions, so the hook has no effect. Remove the hook, or change "
            "inv_freq."
        )


def _read(module: nn.Module) -> tuple[list[Tensor], list[Any]]:
    """Return the frequencies of a rotary embedding, and its class and scaling factors."""
    kinds = getattr(module, "rope_type", "default")
    several = kinds if isinstance(kinds, dict) else {None: kinds}
    tensors: list[Tensor] = []
    numbers: list[Any] = [type(module)]
    for name, kind in several.items():
        prefix = f"{name}_" if name is not None and hasattr(module, f"{name}_inv_freq") else ""
        frequencies = getattr(module, f"{prefix}inv_freq", None)
        if kind in _BY_LENGTH or frequencies is None or frequencies.is_meta:
            continue
        tensors.append(frequencies)
        numbers.append(getattr(module, f"{prefix}attention_scaling", None))
    return tensors, numbers


def _hooks(module: nn.Module | None) -> list[Any]:
    """Return the hooks that run before and after a module's forward; each may change its result."""
    if module is None:
        return []
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.device != other.device or one.dtype != other.dtype:
        # The model was moved to another device or dtype. That is refused elsewhere, with a better
        # message.
        one, other = one.cpu(), other.to("cpu", one.dtype)
    return torch.equal(one, other)
