"""What tells one model from another, read from what is at hand: no weight is made dense or loaded.

Of an ordinary model these are some numbers of all its weights. Of one that is sharded, quantized or
offloaded they are numbers of the local shard, of the quantized payload, and of the weights where
they wait: so the same model loaded in the same way has the same fingerprint, and loaded in another
way it may have another. Knows nothing about files, caches or streams.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

SOME = 64
"""Numbers of each weight that are looked at, the first ones."""
PLACES = ("rope_parameters", "layer_types", "sliding_window")
"""What a configuration says of positions and windows: no weights, but another model."""


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """The shape of a model, and a checksum over some of all its weights."""
    config = model.config.get_text_config(decoder=True)
    return {
        "kind": config.model_type,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "vocabulary": config.vocab_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": _digest(model, _said(config)),
    }


def weights_of(decoder: nn.Module, config: Any) -> str:
    """What tells a decoder's weights from others of the same shapes; worked out once for each.

    It is worked out again when a weight was replaced or written to. What is written behind
    PyTorch's back, through `weight.data`, is not noticed.

    Args:
        decoder: the module that caches are for.
        config: its configuration.
    """
    said = _said(config)
    now = [
        (weight, _version(weight), weight.device, weight.dtype)
        for module in decoder.modules()
        for _, weight in _weights(module)
    ]
    known = _KNOWN.get(decoder)
    if known is not None and known.said == said and len(known.seen) == len(now):
        same = (
            was() is weight and its == more
            for (was, *its), (weight, *more) in zip(known.seen, now, strict=True)
        )
        if all(same):
            return known.digest
    digest = _digest(decoder, said)
    seen = [(weakref.ref(weight), *more) for weight, *more in now]
    _KNOWN[decoder] = _Known(said, seen, digest)
    return digest


@dataclass(frozen=True)
class _Known:
    """The digest of a decoder's weights, and what it was when that was worked out.

    Attributes:
        said: what its configuration said.
        seen: each weight, its version, device and dtype.
        digest: of them.
    """

    said: str
    seen: list[tuple[Any, ...]]
    digest: str


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
"""By decoder."""


def _said(config: Any) -> str:
    """What a configuration says of positions and windows."""
    return repr([getattr(config, name, None) for name in PLACES])


def _version(weight: Tensor) -> int:
    """How often a weight was written to; 0 where nobody counts."""
    try:
        return weight._version
    except RuntimeError:  # made in inference mode
        return 0


def _digest(model: nn.Module, said: str) -> str:
    """A checksum over what a configuration said and some of all weights of a module."""
    digest = hashlib.sha256(said.encode())
    for name, module in sorted(model.named_modules()):
        for own, weight in sorted(_weights(module)):
            digest.update(f"{name}.{own} {list(weight.shape)} {weight.dtype}".encode())
            for part in _parts(weight, module, own):
                digest.update(_numbers(part))
    return digest.hexdigest()[:16]


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, and the buffers that are saved: some quantizers have those."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _parts(weight: Tensor, module: nn.Module, name: str) -> Iterator[Tensor]:
    """The tensors that hold a weight's numbers here."""
    if weight.device.type == "meta":
        waiting = _waiting(module, name)
        if waiting is not None:
            yield waiting
    elif is_traceable_wrapper_subclass(weight):  # a shard (DTensor), a quantized weight (torchao)
        names, _ = weight.__tensor_flatten__()
        for inner in (getattr(weight, each) for each in names):
            if isinstance(inner, Tensor):  # a shard also names its mesh
                yield from _parts(inner, module, name)
    else:
        yield weight


def _waiting(module: nn.Module, name: str) -> Tensor | None:
    """An offloaded weight where accelerate's hook keeps it; None if nobody knows where."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        waiting = getattr(one, "weights_map", None)
        if waiting is not None:
            with contextlib.suppress(KeyError):  # another hook's
                return torch.as_tensor(waiting[name])
    return None


def _numbers(t: Tensor) -> bytes:
    """The first numbers of a tensor as they lie in memory."""
    some = t.detach().reshape(-1)[:SOME].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes()
