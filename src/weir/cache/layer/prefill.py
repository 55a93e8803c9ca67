"""A whole prompt at once (`prefill="full"`): plain causal attention over it, in blocks of queries.

Knows nothing about slabs or folds: what it returns beside the answers are the prompt's tokens as
arrivals, for the fold that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weir.cache.layer.mask import band
from weir.cache.layer.plan import Piece
from weir.slab import (
    Form,
    Place,
    Slots,
    attention_mass,
    fused_attention,
    fuses,
    two_weight_attention,
)

QUERY_BLOCK = 256
"""Queries handled at once, so that no mask is as large as the prompt squared."""


def exactly(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    form: Form,
    piece: Piece,
    place: Place,
    *,
    mass: bool,
) -> tuple[Tensor, Slots]:
    """Answer every query of a prompt from all tokens before it.

    Args:
        queries: at their places [batch, kv_heads, group, width, key_dim].
        keys: at their places [batch, kv_heads, width, key_dim].
        values: [batch, kv_heads, width, value_dim].
        form: how the layer attends.
        piece: the prompt's tokens; rows may have fewer than `width`.
        place: what the layer knows about positions.
        mass: whether the attention that tokens receive is counted.

    Returns:
        Answers [batch, kv_heads, group, width, value_dim], and the tokens.
    """
    kv_heads, width = keys.shape[1], piece.width
    zeros = torch.zeros(keys.shape[:3], device=keys.device)
    received = zeros.clone() if mass else None
    steps = torch.arange(width, device=keys.device)[None, None]
    outs = []
    for start in range(0, width, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, width)
        bias = band(stop - start, stop, place.window, queries.dtype, keys.device)
        if place.alibi is not None:
            bias = bias + place.alibi.bias(steps[..., :stop], kv_heads, 0, stop - 1)
        block, k, v = queries[:, :, :, start:stop], keys[:, :, :stop], values[:, :, :stop]
        weights = zeros[..., :stop]
        if received is not None:
            real = torch.where(piece.real[:, None, None, start:stop, None], 0.0, -torch.inf)
            received[:, :, :stop] += attention_mass(block, k, weights, form, bias + real)
        if fuses(form):
            outs.append(fused_attention(block, k, v, form, bias))
        else:
            outs.append(two_weight_attention(block, k, v, weights, weights, form, bias))
    position = piece.positions.expand(-1, kv_heads, -1)
    return torch.cat(outs, dim=3), Slots(keys, values, zeros, zeros.clone(), position, received)
