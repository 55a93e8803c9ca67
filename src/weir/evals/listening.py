"""A cache that hears what every layer is asked and what it answers, on any model weir serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from weir.cache import Forward, StreamingCache
from weir.slab import AttentionParams


class Listening(StreamingCache, ABC):
    """A cache with an ear on its layers."""

    @abstractmethod
    def hear(
        self,
        forward: Forward,
        layer: int,
        asked: tuple[Tensor, Tensor, Tensor],
        params: AttentionParams,
        out: Tensor,
    ) -> None:
        """Told of each layer in each call, once it has answered.

        Args:
            forward: the call.
            layer: which layer.
            asked: queries [batch, heads, length, key_dim], keys [batch, kv_heads, length, key_dim]
                and values [batch, kv_heads, length, value_dim], as the layer got them.
            form: how it attends.
            out: what it answered [batch, heads, length, value_dim].
        """

    def begin(self, given: dict[str, Any], without: tuple[int, ...] = ()) -> Forward:
        """As ever, with an ear on the layers."""
        forward = super().begin(given, without)
        attend = forward.attend

        def listen(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
        ) -> Tensor:
            out = attend(layer, queries, keys, values, params)
            self.hear(forward, layer, (queries, keys, values), params, out)
            return out

        forward.attend = listen  # type: ignore[method-assign]
        return forward
