"""Queries and keys put in their places, and the slab read.

Between the layer, which knows what has come, and the formula, which knows nothing but tensors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from weir import kernels
from weir.cache.layer.mask import band
from weir.cache.layer.observation_window import AT_ONCE
from weir.cache.layer.plan import Segment
from weir.cache.layer.spec import LayerSpec
from weir.slab import (
    AttentionParams,
    Rotary,
    Slab,
    Slots,
    Watched,
    attention_mass,
    fused_attention,
    is_uncapped,
    split_attention,
    two_weight_attention,
    two_weight_kernel,
    watched_attention,
)


def rotate_to_positions(
    spec: LayerSpec, slab: Slab, queries: Tensor, keys: Tensor, segment: Segment
) -> tuple[Tensor, Tensor]:
    """Queries and keys at their places in the stream, as attention is to see them.

    Args:
        spec: the layer.
        slab: its slots, before the segment is in them.
        queries: [batch, kv_heads, group, width, key_dim].
        keys: [batch, kv_heads, width, key_dim].
        segment: their tokens.
    """
    if spec.positions.rotary is not None and not spec.positions.placed:
        queries, keys = _rotated(spec.positions.rotary, queries, keys, segment.positions)
    if spec.pipe.log_n:
        queries = _sharpened(slab, queries, segment)
    return queries, keys


def attend_slots(
    spec: LayerSpec,
    slab: Slab,
    queries: Tensor,
    params: AttentionParams,
    bias: Tensor | None,
    slots: tuple[int, int],
    *,
    plain: bool,
    causal: bool = False,
) -> Tensor:
    """Attention over some slots [batch, kv_heads, group, width, value_dim].

    Args:
        spec: the layer.
        slab: its slots.
        queries: [batch, kv_heads, group, width, key_dim].
        form: how the layer attends.
        bias: who sees whom, over all slots to the last of them.
        slots: from the first that is in use in any row to behind the last.
        plain: every slot that a query may see holds one token that counts once, so that weights
            need not be looked at.
        causal: the queries are of the last slots, and each sees all slots up to its own: the bias
            says no more than that.
    """
    start, stop = slots
    if causal and is_uncapped(params) and params.sinks is None:
        kernel = kernels.causal(queries, slab.values)
        if kernel is not None:
            mask, factors = None, None
            if slab.split is not None and not plain:
                mask, *factors = (t[:, :, start:stop] for t in slab.split)
            elif not plain:
                mask = slab.b[:, :, start:stop]
            exact, quantized = _as_stored(slab, slots)
            answers: Tensor = kernel(queries, *exact, mask, params.scale, factors, quantized)
            return answers
    out = _by_kernel(slab, queries, params, bias, slots, plain=plain)
    if out is not None:
        return out
    if bias is not None and start and bias.shape[4] > 1:
        bias = bias[..., start:]
    keys, values = slab.read(start, stop)
    each = two_weight_kernel(queries)
    if each or not is_uncapped(params):
        return (each or two_weight_attention)(
            queries, keys, values, slab.a[:, :, start:stop], slab.b[:, :, start:stop], params, bias
        )
    if not plain:
        if slab.split is not None:
            mask, above, below = (t[:, :, start:stop] for t in slab.split)
            return split_attention(queries, keys, values, mask, above, below, params, bias)
        below = slab.b[:, :, None, None, start:stop]
        bias = below if bias is None else bias + below
    return fused_attention(queries, keys, values, params, bias)


def observe(
    spec: LayerSpec,
    slab: Slab,
    queries: Tensor,
    params: AttentionParams,
    bias: Tensor | None,
    slots: tuple[int, int],
) -> Watched | None:
    """`attend_slots` of a whole tail that folds next, with what the fold is going to ask about it.

    Args:
        spec, slab, queries, form, bias, slots: as for `attend_slots`, of rows that all lie alike.

    Returns:
        What all slots from slot 0 on received, and where pools need them shares of these slots.
        None where that would be slower than to ask for it in the fold, or hold more at once;
        `attend_slots` serves everything.
    """
    whole_tail = queries.shape[3] == spec.chunk and queries.dtype == torch.float32
    start, stop = slots
    fits = queries.shape[:4].numel() * stop <= AT_ONCE
    plain = is_uncapped(params) and params.sinks is None and slab.split is None
    if not (whole_tail and fits and plain and queries.device.type == "cpu"):
        return None
    everywhere = spec.positions.window is not None or spec.positions.alibi is not None
    kernel, b = kernels.causal_and_received(queries, slab.values), slab.b[:, :, start:stop]
    watched = None
    if kernel is not None and not spec.pipe.needs_shares and not everywhere:
        exact, quantized = _as_stored(slab, slots)
        counted = kernel(queries, *exact, b, params.scale, quantized)
        watched = None if counted is None else Watched(*counted)
    if watched is None:
        if bias is not None and bias.shape[4] > 1:
            # Of rows that lie alike, a query sees whatever lies in front of the tail.
            bias = bias[..., start if everywhere else -spec.chunk :]
        watched = watched_attention(queries, *slab.read(start, stop), b, params, bias)
    if watched is None or not start:
        return watched
    return watched._replace(received=F.pad(watched.received, (start, 0)))


def _as_stored(
    slab: Slab, slots: tuple[int, int]
) -> tuple[tuple[Tensor, Tensor], tuple[kernels.QuantizedVectors, kernels.QuantizedVectors] | None]:
    """Some slots for a kernel that reads 8 bits by itself: (keys and values, and those of quantized
    slots in front of them); these are None where there are none, or all is read beforehand.
    """
    start, stop = slots
    quantized = None
    if slab.quantized is not None and start < slab.first:
        quantized = slab.quantized.bytes_of(start, slab.first)
    return slab.read(start if quantized is None else slab.first, stop), quantized


def _by_kernel(
    slab: Slab,
    queries: Tensor,
    params: AttentionParams,
    bias: Tensor | None,
    slots: tuple[int, int],
    *,
    plain: bool,
) -> Tensor | None:
    """`attend_slots` by a kernel that takes slots as they lie; None where there is none.

    It takes one query a head, logits without a cap or sinks, and one weight for each slot.
    """
    if queries.shape[3] != 1 or not is_uncapped(params) or params.sinks is not None:
        return None
    biased = bias is not None and bias.shape[2] > 1
    if biased or (slab.split is not None and not plain):
        return None
    first = slab.first
    quantized = slab.quantized if slots[0] < first else None
    if quantized is None:
        kernel = kernels.decode_exact(slab.keys.device, slab.keys.dtype)
    else:
        kernel = kernels.decode_quantized(queries.device)
    if kernel is None:
        return None
    mask = None
    if not plain or bias is not None:
        mask = slab.b[:, :, : slots[1]]
        mask = mask if bias is None else mask + bias[:, :, 0, 0]
    exact = slab.keys, slab.values
    if quantized is not None:
        out: Tensor = kernel(queries, quantized.stored, *exact, mask, params.scale, slots)
        return out
    mask = mask if mask is None else mask[:, :, first:]
    out = kernel(queries, *exact, mask, params.scale, (slots[0] - first, slots[1] - first))
    return out


def _rotated(
    rotary: Rotary, queries: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys of a segment at its positions, in one go."""
    kv_heads, group = queries.shape[1:3]
    both = rotary.rotate(torch.cat([queries.flatten(1, 2), keys], dim=1), positions)
    queries, keys = both.split([kv_heads * group, kv_heads], dim=1)
    return queries.unflatten(1, (kv_heads, group)), keys


def _sharpened(slab: Slab, queries: Tensor, segment: Segment) -> Tensor:
    """Queries times log_512(n), n being the tokens that each sees (BUZZ, section 3.5)."""
    position, start = slab.position, segment.start[:, None, None]
    before = ((position >= 0) & (position < start)).sum(dim=2, keepdim=True)
    n = before + torch.arange(1, segment.width + 1, device=position.device)
    factor = n.log() / math.log(512)
    return (queries * factor[:, :, None, :, None]).to(queries.dtype)


QUERY_BLOCK = 256
"""Queries handled at once, so that no mask is as large as the prompt squared."""


def attend_prompt(
    spec: LayerSpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    params: AttentionParams,
    segment: Segment,
    answers: bool = True,
) -> tuple[Tensor, Slots]:
    """Answer every query of a prompt from all tokens before it.

    Args:
        spec: the layer; a pool of its pipe may want the attention that tokens receive.
        queries: at their places [batch, kv_heads, group, width, key_dim].
        keys: at their places [batch, kv_heads, width, key_dim].
        values: [batch, kv_heads, width, value_dim].
        form: how the layer attends.
        segment: the prompt's tokens; rows may have fewer than `width`.
        answers: whether anybody asks; if not, the answers are zeros and only the tokens count.

    Returns:
        Answers [batch, kv_heads, group, width, value_dim], and the tokens.
    """
    kv_heads, width, positions = keys.shape[1], segment.width, spec.positions
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
            real = torch.where(segment.real[:, None, None, start:stop, None], 0.0, -torch.inf)
            received[:, :, :stop] += attention_mass(block, k, weights, params, bias + real)
        if not answers:
            continue
        if is_uncapped(params):
            outs.append(fused_attention(block, k, v, params, bias))
        else:
            outs.append(two_weight_attention(block, k, v, weights, weights, params, bias))
    position = segment.positions.expand(-1, kv_heads, -1)
    shape = (*queries.shape[:-1], values.shape[3])
    out = torch.cat(outs, dim=3) if answers else values.new_zeros(shape)
    spans = None
    if spec.moves_on_axes:
        spans = segment.spans[:, None].expand(-1, kv_heads, -1, -1)
    return out, Slots(keys, values, zeros, zeros.clone(), position, received, spans)
