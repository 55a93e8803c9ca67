"""A whole prompt at once (`prefill="full"`): plain causal attention over it, in blocks of queries.

Knows nothing about slabs or folds: what it returns beside the answers are the prompt's tokens as
arrivals, for the fold that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weir.cache.layer.mask import band
from weir.cache.layer.plan import Piece
from weir.cache.layer.spec import LayerSpec
from weir.slab import (
    Form,
    Slots,
    attention_mass,
    fused_attention,
    fuses,
    two_weight_attention,
)

QUERY_BLOCK = 256
"""Queries handled at once, so that no mask is as large as the prompt squared."""


def attend_prompt(
    spec: LayerSpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    form: Form,
    piece: Piece,
    answers: bool = True,
) -> tuple[Tensor, Slots]:
    """Answer every query of a prompt from all tokens before it.

    Args:
        spec: the layer; a pool of its pipe may want the attention that tokens receive.
        queries: at their places [batch, kv_heads, group, width, key_dim].
        keys: at their places [batch, kv_heads, width, key_dim].
        values: [batch, kv_heads, width, value_dim].
        form: how the layer attends.
        piece: the prompt's tokens; rows may have fewer than `width`.
        answers: whether anybody asks; if not, the answers are zeros and only the tokens count.

    Returns:
        Answers [batch, kv_heads, group, width, value_dim], and the tokens.
    """
    kv_heads, width, positions = keys.shape[1], piece.width, spec.positions
    zeros = torch.zeros(keys.shape[:3], device=keys.device)
    received = zeros.clone() if spec.pipe.needs_mass else None
    steps = torch.arange(width, device=keys.device)[None, None]
    outs = []
    asked = answers or received is not None
    for start in range(0, width if asked else 0, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, width)
        bias = band(stop - start, stop, positions.window, queries.dtype, keys.device)
        if positions.alibi is not None:
            bias = bias + positions.alibi.bias(steps[..., :stop], kv_heads, 0, stop - 1)
        block, k, v = queries[:, :, :, start:stop], keys[:, :, :stop], values[:, :, :stop]
        weights = zeros[..., :stop]
        if received is not None:
            real = torch.where(piece.real[:, None, None, start:stop, None], 0.0, -torch.inf)
            received[:, :, :stop] += attention_mass(block, k, weights, form, bias + real)
        if not answers:
            continue
        if fuses(form):
            outs.append(fused_attention(block, k, v, form, bias))
        else:
            outs.append(two_weight_attention(block, k, v, weights, weights, form, bias))
    position = piece.positions.expand(-1, kv_heads, -1)
    shape = (*queries.shape[:-1], values.shape[3])
    out = torch.cat(outs, dim=3) if answers else values.new_zeros(shape)
    spans = None
    if spec.moves_on_axes:
        spans = piece.spans[:, None].expand(-1, kv_heads, -1, -1)
    return out, Slots(keys, values, zeros, zeros.clone(), position, received, spans)
