"""Observes the attention of a model's layers through transformers' attention interface.

Models that weir streams can also be observed through a cache: `cache.ListeningCache` reports each
call with the slots that the cache holds. This file works without a cache, for any model that uses
the interface, including encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from weir.errors import WeirError
from weir.models.interception import forward_lock_of
from weir.slab import AttentionParams, two_weight_attention

ATTENTION = "weir_observed"
"""The name under which transformers finds `_attend`."""


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one layer's attention in one call.

    Attributes:
        module: the layer's attention module.
        queries: [batch, heads, length, key_dim]; queries and keys are already rotated, if the model
            rotates them.
        keys, values: [batch, kv_heads, tokens, key_dim] and [..., value_dim].
        params: the parameters of the attention.
        mask: true where a query attends, broadcasts with [batch, 1, length, tokens]; None if every
            query attends to every token.
    """

    module: nn.Module
    queries: Tensor
    keys: Tensor
    values: Tensor
    params: AttentionParams
    mask: Tensor | None


Hear = Callable[[AttentionInputs], None]
"""A callback that receives the inputs of each attention."""
_hear: ContextVar[Hear] = ContextVar("hear")
"""The callback of `observe_attention` in this thread."""


@contextmanager
def observe_attention(config: Any, hear: Hear) -> Iterator[None]:
    """Within the context, call `hear` before each attention that a model of this configuration
    computes.

    The model's attention is computed by SDPA, or by weir's formula if the model caps its logits or
    has trained attention sinks. Calls in other threads wait if weir's hooks are on the model;
    otherwise they fail.

    Raises:
        WeirError: in the model's forward, if the model adds numbers to its attention logits.
    """
    lock = forward_lock_of(config)
    with lock, lock.attention(ATTENTION):
        before = _hear.set(hear)
        try:
            yield
        finally:
            _hear.reset(before)


def bias_of(seen: Tensor) -> Tensor:
    """Return 0 where a mask is true, and -inf elsewhere."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers that reports its inputs."""
    params, mask = AttentionParams.from_call(query, key, scaling, softcap, s_aux), attention_mask
    if mask is not None and mask.dtype != torch.bool:
        raise WeirError(
            "this model adds numbers to its attention logits, which cannot be distinguished from "
            "a mask"
        )
    if (hear := _hear.get(None)) is None:
        raise WeirError(
            "another thread observes the attention of this model. Call the model when that thread "
            "is done, or load a second copy of it."
        )
    hear(AttentionInputs(module, query, key, value, params, mask))
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            scale=params.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        none, bias = key.new_zeros(1, 1, 1), None if mask is None else bias_of(mask[:, None])
        group = query.unflatten(1, (key.shape[1], -1))
        out = two_weight_attention(group, key, value, none, none, params, bias).flatten(1, 2)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return transformers' mask as booleans; None only if every query sees everything."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _mask)
