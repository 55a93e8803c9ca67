"""StreamingLLM one token at a time, from the papers alone: what weir is checked against.

Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks", section 3.2: "we cache
the keys of tokens prior to introducing the rotary transformation. Subsequently, we apply position
transformation to the keys in the rolling cache at each decoding phase"; positions are those within
the cache; for ALiBi, the linear bias is that of those positions.

The model's own layers do everything except storing keys. This is slow but simple.

- Rotary (Su et al. 2021, RoFormer, equation 16): <R(m) q, R(n) k> = <q, R(n - m) k>. So the model
  is told that every new token is at position 0, where R is the identity, and the cache returns its
  keys rotated by their distance to the query: the n-th key by n minus the query's position.
- ALiBi (Press et al. 2022, section 3): the model counts the keys that the cache returns, and biases
  them by their positions among these.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


def streaming_logits(
    model: PreTrainedModel,
    ids: Tensor,
    sinks: int,
    budget: int,
    unrotated: Collection[int] = (),
) -> Tensor:
    """Logits after each token of a stream under StreamingLLM.

    Args:
        model: a causal language model.
        ids: [batch, length], or embeddings instead [batch, length, width].
        sinks: tokens from the start of the stream that stay.
        budget: tokens that stay in all; a new one attends to these and to itself.
        unrotated: layers that do not rotate (or bias) at all.

    Returns:
        [batch, length, vocabulary].
    """
    kept = Kept(model, sinks, budget, unrotated)
    extra: dict[str, Any] = {}
    if kept.rotary is not None:
        extra["position_ids"] = torch.zeros(1, 1, dtype=torch.int64)
    if any(kept.is_own):
        # Nothing must be hidden. Older transformers would make one mask for all layers, although
        # they keep different numbers of tokens.
        extra["attention_mask"] = dict.fromkeys(kept.types)
    logits = []
    with torch.no_grad():
        for place in range(ids.shape[1]):
            token = ids[:, place : place + 1]
            name = "inputs_embeds" if token.is_floating_point() else "input_ids"
            out = model(**{name: token}, past_key_values=kept, use_cache=True, **extra)
            logits.append(out.logits)
    return torch.cat(logits, dim=1)


class Kept(Cache):
    """The unrotated keys and the values that StreamingLLM keeps in every layer."""

    def __init__(
        self, model: PreTrainedModel, sinks: int, budget: int, unrotated: Collection[int]
    ) -> None:
        super().__init__(layers=[])
        config: Any = model.config.get_text_config(decoder=True)
        decoder: Any = model.get_decoder()
        self.rotary: Any = getattr(decoder, "rotary_emb", None)
        if getattr(config, "alibi", False):
            self.rotary = None  # Falcon has the module even with ALiBi
        self.unrotated = unrotated
        layers = config.num_hidden_layers
        self.types = getattr(config, "layer_types", None) or ["full_attention"] * layers
        # If the model also has layers with full attention, sliding layers keep their own window.
        mixed = "full_attention" in self.types
        self.is_own = [mixed and kind == "sliding_attention" for kind in self.types]
        self.limits = [(sinks, budget)] * layers
        for layer in range(layers):
            if self.is_own[layer]:
                self.limits[layer] = (0, config.sliding_window - 1)  # and the new token itself
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return all keys, each at its place in the cache, and all values, and drop the middle."""
        keys, values = key_states, value_states
        if layer_idx in self.keys:
            keys = torch.cat([self.keys[layer_idx], keys], dim=2)
            values = torch.cat([self.values[layer_idx], values], dim=2)
        sinks, budget = self.limits[layer_idx]
        self.keys[layer_idx] = without_middle(keys, sinks, budget)
        self.values[layer_idx] = without_middle(values, sinks, budget)
        if self.rotary is not None and layer_idx not in self.unrotated:
            query = keys.shape[2] - 1
            keys = rotated(keys, torch.arange(keys.shape[2]) - query, self._frequencies(layer_idx))
        return keys, values

    def _frequencies(self, layer: int) -> Tensor:
        """Radians per position; some models have frequencies for each type of layer."""
        found = getattr(self.rotary, f"{self.types[layer]}_inv_freq", None)
        return self.rotary.inv_freq if found is None else found

    # transformers calls the following to count places and to make masks, which hide nothing here.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that are kept."""
        return self.keys[layer_idx].shape[2] if layer_idx in self.keys else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """As many columns as there are keys to attend to."""
        return self.get_seq_length(layer_idx) + query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers have their own window, and so their own mask."""
        return self.is_own

    @property
    def is_linear(self) -> list[bool]:
        """No layer has linear attention."""
        return [False] * len(self.types)

    is_dummy = is_linear


def without_middle(kept: Tensor, sinks: int, budget: int) -> Tensor:
    """The first `sinks` and the newest up to `budget` of [batch, kv_heads, tokens, dim]."""
    if kept.shape[2] <= budget:
        return kept
    newest = kept.shape[2] - (budget - sinks)
    return torch.cat([kept[:, :, :sinks], kept[:, :, newest:]], dim=2)


def rotated(keys: Tensor, places: Tensor, frequencies: Tensor) -> Tensor:
    """Keys [..., tokens, dim], each turned to its place [tokens].

    Dimension i turns together with dimension i + half, by place times the i-th frequency; models
    with partial rotary embedding have frequencies for their first dimensions only.
    """
    half = len(frequencies)
    angle = places.double()[:, None] * frequencies.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    turned = keys.clone()
    for i in range(half):
        x, y = keys[..., i], keys[..., half + i]
        turned[..., i] = x * cos[:, i] - y * sin[:, i]
        turned[..., half + i] = y * cos[:, i] + x * sin[:, i]
    return turned
