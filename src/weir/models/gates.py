"""Gates: a linear map per layer that predicts from keys and values how much a token will be needed.

They are trained on the model (`weir.evals.gates`) and saved in weir's cache folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weir.errors import WeirError, in_words
from weir.models.fingerprints import weights_of
from weir.models.kept_files import cache_folder

WEIGHT = "weight."


@dataclass(frozen=True)
class Gate:
    """The gate of one layer.

    Attributes:
        weight: for each KV head, the weight of each number of all heads' keys and values, and a
            constant [kv_heads * (key_dim + value_dim) + 1, kv_heads], float32.
    """

    weight: Tensor

    def __call__(self, keys: Tensor, values: Tensor) -> Tensor:
        """Predict the logarithm of the largest share of attention that each token will receive
        [batch, kv_heads, n], float32.

        Keys and values [batch, kv_heads, n, dim] must belong to the same tokens in all heads, and
        keys must be without rotation. Raises WeirError if the gate was trained for other heads.
        """
        given = features(keys, values)
        weight = self.weight.to(given.device)
        if weight.shape != (given.shape[2], keys.shape[1]):
            raise WeirError(
                f"these gates are for {in_words(weight.shape[1], 'head')} and "
                f"{weight.shape[0] - 1} numbers "
                f"of keys and values, but this layer has {keys.shape[1]} and "
                f"{given.shape[2] - 1}. Train them again with weir calibrate --gates."
            )
        return (given @ weight).transpose(1, 2)


def features(keys: Tensor, values: Tensor) -> Tensor:
    """Join the inputs of a gate: keys and values of all heads, and a constant 1. Returns [batch, n,
    numbers], float32.
    """
    both = torch.cat([keys, values], dim=3).float().transpose(1, 2).flatten(2)
    return torch.cat([both, both.new_ones(*both.shape[:2], 1)], dim=2)


def load_gates(decoder: nn.Module, config: Any) -> dict[int, Gate]:
    """Load the gates of a model, by layer; {} if it has none, WeirError if they cannot be read."""
    path = _file(decoder, config)
    if not path.is_file():
        return {}
    try:
        tensors = load_file(path)
        return {int(name.removeprefix(WEIGHT)): Gate(t.float()) for name, t in tensors.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise WeirError(
            f"the gates in {path} cannot be read ({error}). Delete the file, and train them again "
            "with weir calibrate --gates."
        ) from None


def save_gates(decoder: nn.Module, config: Any, gates: Mapping[int, Gate]) -> Path:
    """Save the gates of a model where `load_gates` finds them, and return the file."""
    path = _file(decoder, config)
    part = path.with_suffix(".part")
    named = {f"{WEIGHT}{layer}": gate.weight.contiguous() for layer, gate in gates.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(named, part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeirError(f"cannot write the gates {path}: {reason}") from None
    return path


def _file(decoder: nn.Module, config: Any) -> Path:
    return cache_folder() / "gates" / f"{weights_of(decoder, config)}.safetensors"
