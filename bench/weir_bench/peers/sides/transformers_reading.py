"""Read the tasks of `quality` with the caches of transformers.

The caches keep all tokens, a fixed number of them, a sliding window, or 4-bit values. Caches with 4
bits need `optimum-quanto` or `hqq`, and are not measured if the package is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from protocol import serve
from reading import NANO, PIECE, Begin, Reader, size_of
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    QuantizedCache,
    StaticCache,
)


class Cached:
    """nano with a cache of transformers."""

    def __init__(self, model: Any, cache: Any, rows: int, step: int) -> None:
        self.model, self.cache, self.rows, self.step = model, cache, rows, step

    def feed(self, ids: Tensor) -> Tensor:
        pieces = ids.split(self.step, dim=1)
        told = [self.model(input_ids=piece, past_key_values=self.cache).logits for piece in pieces]
        return torch.cat(told, dim=1)

    def nbytes(self) -> int:
        return sum(map(_bytes_of, self.cache.layers)) // self.rows


def _bytes_of(layer: Any) -> int:
    """Return the bytes of a layer of a cache, including its quantized tensors."""
    packed = [getattr(layer, name, None) for name in ("_quantized_keys", "_quantized_values")]
    return size_of(layer.keys, layer.values) + sum(map(_packed, packed))


def _packed(what: Any) -> int:
    """Return the bytes of a quantized tensor.

    A tensor of quanto lists its parts by name. hqq has a tuple of tensors and their metadata.
    """
    if what is None:
        return 0
    if hasattr(what, "__tensor_flatten__"):
        return sum(_packed(getattr(what, name)) for name in what.__tensor_flatten__()[0])
    return size_of(what)


def _dynamic(model: Any, rows: int, slots: int) -> Cached:
    return Cached(model, DynamicCache(config=model.config), rows, PIECE)


def _static(model: Any, rows: int, slots: int) -> Cached:
    cache = StaticCache(config=model.config, max_cache_len=slots + PIECE)
    return Cached(model, cache, rows, PIECE)


def _quantized(backend: str, bits: int, model: Any, rows: int, slots: int) -> Cached:
    axis = 0 if backend == "quanto" else 1
    cache = QuantizedCache(
        backend,
        model.config,
        nbits=bits,
        axis_key=axis,
        axis_value=axis,
        q_group_size=64,
        residual_length=PIECE,
    )
    return Cached(model, cache, rows, 1)


def _sliding(model: Any, rows: int, slots: int) -> Cached:
    """Return nano's weights in a Mistral model, whose layers have a sliding window."""
    facts = {name: fact for name, fact in model.config.to_dict().items() if name != "model_type"}
    config = MistralConfig(**{**facts, "sliding_window": slots + 1})
    sliding = MistralForCausalLM(config).eval()
    sliding.load_state_dict(model.state_dict())
    return Cached(sliding, DynamicCache(config=config), rows, PIECE)


def offers() -> Mapping[str, Begin]:
    """Return functions that make nano with each cache, by name."""
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    kinds: Mapping[str, Callable[..., Any]] = {
        "DynamicCache": _dynamic,
        "StaticCache": _static,
        "DynamicCache, sliding_window": _sliding,
        "QuantizedCache, quanto, 4 bits": partial(_quantized, "quanto", 4),
        "QuantizedCache, hqq, 4 bits": partial(_quantized, "hqq", 4),
    }
    return {name: partial(kind, model) for name, kind in kinds.items()}


if __name__ == "__main__":
    serve(partial(Reader, ("transformers", "torch"), offers))
