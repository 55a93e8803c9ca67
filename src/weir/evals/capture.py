"""Records the queries, keys and values that each layer's attention receives while a model reads.

A cache that keeps everything records them, so this works for every model that weir streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import AttentionCall, ListeningCache
from weir.errors import WeirError
from weir.models import describe
from weir.slab import AttentionParams, LayerPositions

Taken = TypeVar("Taken")


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one layer's attention for a whole text, in float32.

    Attributes:
        layer, layers: index of the layer, and number of layers.
        queries, keys: [1, heads, length, key_dim] and [1, kv_heads, ...]; already rotated to their
            positions if `positions.placed`.
        values: [1, kv_heads, length, value_dim].
        params: scale, capping and other parameters of the layer's attention.
        positions: how the layer encodes positions.
    """

    layer: int
    layers: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    params: AttentionParams
    positions: LayerPositions

    def __len__(self) -> int:
        return self.keys.shape[2]


def capture(
    model: PreTrainedModel, ids: Tensor, layers: Sequence[int] | None = None
) -> list[LayerInputs]:
    """Record the inputs of some layers' attention while a model reads a text [length] exactly.

    By default, these are all layers without a sliding window. A layer that has one, or that does
    not exist, is refused.
    """
    windows = dict(enumerate(layer.positions.window for layer in describe(model).layers))
    for layer in layers or ():
        if windows.get(layer) is not None:
            raise WeirError(
                f"layer {layer} has its own sliding window of {windows[layer]} tokens, so it does "
                "not attend to the whole text. Choose other layers."
            )
    layers = layers or [n for n, window in windows.items() if window is None]
    if not layers:
        raise WeirError(
            "every layer of this model has its own sliding window, so none of them attends to the "
            "whole text"
        )
    return list(capture_each(model, ids, lambda inputs: inputs, layers).values())


def capture_each(
    model: PreTrainedModel,
    ids: Tensor,
    take: Callable[[LayerInputs], Taken],
    layers: Sequence[int] | None = None,
) -> dict[int, Taken]:
    """Apply `take` to the inputs of every named layer, or of all, and return its results by layer.

    Sliding layers are included; a layer that does not exist is refused. Inputs that `take` does not
    keep are freed before the next layer, so that at most one layer's inputs are in memory in
    addition to the model and the cache.
    """
    heard: dict[int, Taken] = {}
    wanted: Sequence[int] = ()

    def hear(call: AttentionCall) -> None:
        if call.layer in wanted:
            spec = call.held.spec
            q, k, v = (t.float() for t in (call.queries, call.keys, call.values))
            inputs = LayerInputs(call.layer, spec.layers, q, k, v, call.params, spec.positions)
            heard[call.layer] = take(inputs)

    listener = ListeningCache(model, "dense", hear, positions="original", chunk=len(ids))
    try:
        count = len(listener.stack)
        wanted = range(count) if layers is None else layers
        for layer in wanted:
            if not 0 <= layer < count:
                raise WeirError(f"layer {layer} does not exist. The layers are 0 to {count - 1}")
        listener.read(ids)
        return dict(sorted(heard.items()))
    finally:
        listener.close()


def in_place(inputs: LayerInputs, x: Tensor) -> Tensor:
    """Rotate a layer's queries or keys to their positions in the text, as its attention reads them.

    Keys in this form are what transformers caches, and what the pools `kcenter`, `subgen` and
    `balance` compare. The first token has position 0.
    """
    rotary = inputs.positions.rotary
    if rotary is None or inputs.positions.placed:
        return x
    return rotary.rotate(x, _places(x))


def unrotated_keys(inputs: LayerInputs) -> Tensor | None:
    """Return the keys of a layer, rotated to position 0 [1, kv_heads, length, key_dim]; None if the
    layer does not rotate keys.
    """
    rotary = inputs.positions.rotary
    if rotary is None:
        return None
    return rotary.move(in_place(inputs, inputs.keys), -_places(inputs.keys))


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)[None, None]
