"""Fingerprints of models, from the weights as they are stored; no weight is dequantized or loaded.

Some numbers of every weight are read: from the local shard, from the quantized data, or from the
place where an offloaded weight is stored. So the same model can have another fingerprint if it is
loaded in another way.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from weir.errors import quote

SOME = 64
"""How many numbers at the beginning of each weight are read."""
PLACES = ("rope_parameters", "layer_types", "sliding_window")
"""Settings of positions and windows. If they differ, the same weights are a different model."""


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's shape, and a checksum over some numbers of every weight."""
    config = model.config.get_text_config(decoder=True)
    return {
        "kind": config.model_type,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "vocabulary": config.vocab_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": _digest(model, _position_settings(config)),
    }


def compare_fingerprints(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], names: Collection[str] | None = None
) -> str:
    """Describe how the fingerprint of another model differs from that of this model, such as
    `layers 2, here 1`; empty if they are equal.

    Args:
        mine: the fingerprint of this model.
        theirs: the other one, which may come from a file.
        names: the entries to compare; None for all.
    """
    differ = [n for n in mine if (names is None or n in names) and mine[n] != theirs.get(n)]
    return ", ".join(f"{n} {quote(theirs.get(n)).strip(chr(39))}, here {mine[n]}" for n in differ)


def weights_of(decoder: nn.Module, config: Any) -> str:
    """Return a checksum of a decoder's weights, cached until a weight is replaced or written to.

    A write through `weight.data`, which PyTorch does not count, is not noticed.
    """
    settings = _position_settings(config)
    now = [weight for module in decoder.modules() for _, weight in _weights(module)]
    state = settings, [(_version(weight), weight.device, weight.dtype) for weight in now]
    seen, known, digest = _KNOWN.get(decoder, ([], None, ""))
    if known == state and all(was() is weight for was, weight in zip(seen, now, strict=True)):
        return digest
    digest = _digest(decoder, settings)
    _KNOWN[decoder] = [weakref.ref(weight) for weight in now], state, digest
    return digest


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], Any, str]]
_KNOWN = weakref.WeakKeyDictionary()
"""By decoder: references to its weights, the state of weights and settings when the digest was
computed, and the digest.
"""


def _position_settings(config: Any) -> str:
    """Return a configuration's settings of positions and windows as text."""
    return repr([getattr(config, name, None) for name in PLACES])


def _version(weight: Tensor) -> int:
    """Return how often a weight was written to; 0 if PyTorch does not count."""
    try:
        return weight._version
    except RuntimeError:  # made in inference mode
        return 0


def _digest(model: nn.Module, settings: str) -> str:
    """Compute a checksum over settings and some numbers of every weight of a module."""
    digest = hashlib.sha256(settings.encode())
    for name, module in sorted(model.named_modules()):
        for own, weight in sorted(_weights(module)):
            digest.update(f"{name}.{own} {list(weight.shape)} {weight.dtype}".encode())
            for part in _parts(weight, module, own):
                digest.update(_numbers(part))
    return digest.hexdigest()[:16]


def digest_rows(modules: Iterable[nn.Module]) -> str:
    """Return a checksum over the first number of every row of all weights in some modules, and over
    all numbers of weights with one dimension.
    """
    digest = hashlib.sha256()
    for module in (inner for outer in modules for inner in outer.modules()):
        for own, weight in sorted(_weights(module)):
            for part in _parts(weight, module, own):
                digest.update(_bytes(part[..., 0] if part.ndim > 1 else part))
    return digest.hexdigest()[:16]


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and saved buffers; some quantizers use buffers."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _parts(weight: Tensor, module: nn.Module, name: str) -> Iterator[Tensor]:
    """Yield the tensors that hold a weight's numbers in this process."""
    if weight.device.type == "meta":
        waiting = _waiting(module, name)
        if waiting is not None:
            yield waiting
    elif is_traceable_wrapper_subclass(weight):  # a shard (DTensor), a quantized weight (torchao)
        names, _ = weight.__tensor_flatten__()
        for inner in (getattr(weight, part) for part in names):
            if isinstance(inner, Tensor):  # a shard also lists its mesh
                yield from _parts(inner, module, name)
    else:
        yield weight


def _waiting(module: nn.Module, name: str) -> Tensor | None:
    """Return an offloaded weight from accelerate's hook; None if no hook has it."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        waiting = getattr(one, "weights_map", None)
        if waiting is not None:
            with contextlib.suppress(KeyError):  # another hook's
                return torch.as_tensor(waiting[name])
    return None


def _numbers(t: Tensor) -> bytes:
    """Return the bytes of a tensor's first numbers."""
    return _bytes(t.reshape(-1)[:SOME])


def _bytes(t: Tensor) -> bytes:
    # Copy, because a tensor of one number counts as contiguous whatever its stride, but cannot be
    # viewed as bytes.
    some = t.detach().reshape(-1).cpu().clone(memory_format=torch.contiguous_format)
    return some.view(torch.uint8).numpy().tobytes()
