"""Queries, keys and values of a model's layers, as its attention gets them while it reads a text.

A cache that keeps everything takes them down on the way, so whatever model weir serves can be
looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import Forward, StreamingCache
from weir.errors import WeirError
from weir.slab import Form, LayerPositions


@dataclass(frozen=True)
class Captured:
    """What the attention of one layer was given for a whole text, in float32.

    Attributes:
        layer, layers: which layer, and of how many.
        queries: [1, heads, length, key_dim]; rotated to their places already if `positions.placed`.
        keys: [1, kv_heads, length, key_dim], the same.
        values: [1, kv_heads, length, value_dim].
        form: how the layer attends.
        positions: what it knows about positions.
    """

    layer: int
    layers: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    form: Form
    positions: LayerPositions

    def __len__(self) -> int:
        return self.keys.shape[2]


class _Listener(StreamingCache):
    """A cache without a limit that takes down what some layers are given."""

    heard: dict[int, Captured]

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], length: int) -> None:
        super().__init__(model, "dense", positions="original", chunk=length)
        self.wanted = frozenset(layers)
        self.heard: dict[int, Captured] = {}

    def begin(self, given: dict[str, Any], without: tuple[int, ...] = ()) -> Forward:
        """As ever, with an ear on the layers."""
        forward = super().begin(given, without)
        attend = forward.attend

        def listen(layer: int, queries: Tensor, keys: Tensor, values: Tensor, form: Form) -> Tensor:
            if layer in self.wanted:
                spec = self.stack[layer].spec
                heard = queries.float(), keys.float(), values.float()
                self.heard[layer] = Captured(layer, spec.layers, *heard, form, spec.positions)
            return attend(layer, queries, keys, values, form)

        forward.attend = listen  # type: ignore[method-assign]
        return forward


def capture(
    model: PreTrainedModel, ids: Tensor, layers: Sequence[int] | None = None
) -> list[Captured]:
    """What the attention of some layers is given while a model reads a text at once, exactly.

    Args:
        model: a causal language model.
        ids: the text [length], int64.
        layers: which layers, from 0 on; None for all that see the whole text. Layers that slide
            over a window of their own keep that window whatever the policy, and are left out.

    Raises:
        WeirError: the model cannot be served, or there is no such layer, or it slides.
    """
    listener = _Listener(model, (), len(ids))
    try:
        count = len(listener.stack)
        whole = [n for n, layer in enumerate(listener.stack) if layer.spec.positions.window is None]
        wanted = whole if layers is None else list(dict.fromkeys(layers))
        for layer in wanted:
            if not 0 <= layer < count:
                raise WeirError(
                    f"layer {layer} does not exist; the model's layers are 0 to {count - 1}"
                )
            if layer not in whole:
                window = listener.stack[layer].spec.positions.window
                raise WeirError(
                    f"layer {layer} slides over a window of {window} tokens of its own, whatever "
                    "the policy; take others"
                )
        if not wanted:
            raise WeirError("every layer of this model slides over a window of its own")
        listener.wanted = frozenset(wanted)
        with torch.no_grad():
            model(input_ids=ids[None].to(model.device), past_key_values=listener, use_cache=True)
        return [listener.heard[layer] for layer in sorted(wanted)]
    finally:
        listener.detach()
