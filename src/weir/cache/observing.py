"""Observe the attention of each layer while a model reads through a cache.

`ListeningCache` passes every call of a layer to a callback. `Attention` computes the logits and
weights of a call for one block of queries at a time, so that a map of a long sequence never exists
as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache.cache import StreamingCache
from weir.cache.forward import Forward
from weir.cache.layer import Layer
from weir.models import CACHE, Given, bias_of, input_device, transformers_model
from weir.policies import Policy
from weir.slab import AttentionParams, LayerPositions, attention_softmax, compute_logits

BLOCK = 64
"""Number of queries whose logits exist at the same time."""


@dataclass(frozen=True)
class Attention:
    """Queries of one layer in one call, and the keys that they may see.

    Attributes:
        layer: index of the layer.
        queries: [batch, kv_heads, group, length, key_dim]; `group` query heads share a KV head.
        keys: [batch, kv_heads, slots, key_dim].
        first: position of the first query.
        places: positions of the keys [slots], int64.
        params: the parameters of the layer's attention.
        positions: the layer's window and linear biases, for models that weir streams.
        mask: for other models, transformers' mask: true where a query attends, broadcasts with
            [batch, 1, length, slots]; None if queries attend everywhere.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    first: int
    places: Tensor
    params: AttentionParams
    positions: LayerPositions | None = None
    mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of queries per head."""
        return self.queries.shape[3]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.queries.shape[1] * self.queries.shape[2]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of blocks of queries, at most `BLOCK` in each."""
        for start in range(0, self.length, BLOCK):
            yield start, min(start + BLOCK, self.length)

    def logits(self, start: int, stop: int) -> Tensor:
        """Return logits as they enter the softmax: scaled, capped, with linear biases.

        Sink logits are not included. ALiBi biases are 0 at the query's own position, because a
        constant does not change a softmax. The logits of queries `start` to `stop` of this call are
        [batch, heads, stop - start, slots], float32; -inf where a query does not attend.
        """
        queries, bias = self.queries[..., start:stop, :], self._bias(start, stop)
        return compute_logits(queries, self.keys, self.params, bias).flatten(1, 2)

    def weights(self, start: int, stop: int) -> Tensor:
        """Return the model's attention weights: the softmax of `logits`, of the same shape.

        If the layer has sink logits, they take part in the softmax, so the weights of a query sum
        to less than 1.
        """
        logits = self.logits(start, stop).unflatten(1, (self.keys.shape[1], -1))
        return attention_softmax(logits, logits.new_zeros(1, 1, 1), self.params).flatten(1, 2)

    def largest_shares(self, start: int, stop: int) -> Tensor:
        """Return the largest weight that each of the keys `start` to `stop` gets from any query.

        The maximum is over all queries of the call and all query heads of a KV head, in the first
        row of the batch [kv_heads, stop - start], float32.
        """
        heads = self.keys.shape[1]
        most = torch.zeros(heads, stop - start, device=self.keys.device)
        for begin, end in self.blocks():
            shares = self.weights(begin, end)[0, :, :, start:stop].unflatten(0, (heads, -1))
            most = most.maximum(shares.amax(dim=(1, 2)))
        return most

    def _bias(self, start: int, stop: int) -> Tensor | None:
        """Return the linear biases of the queries `start` to `stop`, with -inf where they do not
        attend; None if there is no bias.
        """
        if self.positions is None:
            return None if self.mask is None else bias_of(self.mask[:, None, :, start:stop])
        here = torch.arange(start, stop, device=self.places.device) + self.first
        ahead = here[:, None] - self.places
        seen = ahead >= 0
        if self.positions.window is not None:
            seen &= ahead < self.positions.window
        if self.positions.alibi is not None:
            both = torch.cat([self.places, here])[None, None]
            biases = self.positions.alibi.bias(both, self.keys.shape[1], 0, self.first)
            keys, own = biases.split([len(self.places), len(here)], dim=-1)
            return (keys - own.mT).masked_fill_(~seen, -torch.inf)
        return bias_of(seen)


@dataclass(frozen=True)
class AttentionCall:
    """One call of a layer's attention: its inputs and its output.

    Attributes:
        forward: the forward that the call is part of.
        layer: index of the layer.
        held: the layer of the cache.
        queries: [batch, heads, length, key_dim], as the layer received them.
        keys: [batch, kv_heads, length, key_dim], as the layer received them.
        values: [batch, kv_heads, length, value_dim].
        params: the parameters of the layer's attention.
        out: attention output [batch, heads, length, value_dim].
    """

    forward: Forward
    layer: int
    held: Layer
    queries: Tensor
    keys: Tensor
    values: Tensor
    params: AttentionParams
    out: Tensor

    def attention(self) -> Attention:
        """Return the queries with all keys that the layer holds after the call.

        The policy of the cache must be `dense`, and all rows must have tokens at the same places. A
        layer with its own window holds all keys of the call only if the call is no longer than a
        chunk.
        """
        state, positions, queries = self.held.state, self.held.spec.positions, self.queries
        segments = self.forward.plan.on(queries.device).segments
        assert state.slab is not None
        first = int(segments[0].start[0])
        if positions.rotary is not None and not positions.placed:
            places = torch.arange(queries.shape[2], device=queries.device) + first
            queries = positions.rotary.rotate(queries, places[None, None])
        # Tokens are in order, and those of the last segment come last.
        end = state.ends(segments[-1].waiting)[0] + segments[-1].width
        queries = queries.unflatten(1, (self.keys.shape[1], -1))
        keys, places = state.slab.read(0, end)[0], state.slab.position[0, 0, :end]
        return Attention(self.layer, queries, keys, first, places, self.params, positions)


class ListeningCache(StreamingCache):
    """A cache that passes every layer's call to `hear`, on any model that weir streams.

    Decode steps that an engine runs are not passed on. The other arguments are those of
    `StreamingCache`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy,
        hear: Callable[[AttentionCall], None],
        **options: Any,
    ) -> None:
        super().__init__(model, policy, **options)
        self.hear = hear
        self.device = input_device(transformers_model(model))

    def begin(self, given: Given, without: tuple[int, ...] = ()) -> Forward:
        """Begin a forward whose layers report to `hear`."""
        forward = super().begin(given, without)
        attend = forward.attend

        def listen(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
        ) -> Tensor:
            out = attend(layer, queries, keys, values, params)
            held = self.stack[layer]
            self.hear(AttentionCall(forward, layer, held, queries, keys, values, params, out))
            return out

        forward.attend = listen  # type: ignore[method-assign]
        return forward

    def read(self, ids: Tensor) -> None:
        """Read tokens [length] without running the LM head, whose logits would be large."""
        decoder = self.attachment.facts.decoder
        with torch.no_grad():
            batch = ids[None].to(self.device)
            decoder(input_ids=batch, use_cache=True, **{CACHE: self})

    def close(self) -> None:
        """Free the slots, and detach the cache from the model.

        A cache is part of reference cycles, so its slots would otherwise stay until Python searches
        for garbage.
        """
        self.reset()
        self.detach()
