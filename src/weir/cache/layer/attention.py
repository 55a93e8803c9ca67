"""Attention of a layer: rotated queries and keys, masks, and whole prompts."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from weir.cache.layer.plan import Segment, StepEnds
from weir.cache.layer.spec import LayerSpec
from weir.slab import (
    Alibi,
    AttendedSlots,
    AttentionParams,
    LayerPositions,
    Rotary,
    Slab,
    Slots,
    attention_mass,
    select_attention,
)

QUERY_BLOCK = 256
"""Queries computed at once, so that no mask is as large as the prompt squared."""


def rotate_to_positions(
    spec: LayerSpec, slab: Slab, queries: Tensor, keys: Tensor, segment: Segment
) -> tuple[Tensor, Tensor]:
    """Rotate queries [batch, kv_heads, group, width, key_dim] and keys of a segment to their
    places.
    """
    if spec.positions.rotary is not None and not spec.positions.placed:
        queries, keys = _rotate(spec.positions.rotary, queries, keys, segment.positions)
    if spec.pipe.log_n:
        queries = _scale_by_log_n(slab, queries, segment)
    return queries, keys


def _rotate(
    rotary: Rotary, queries: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys of a segment in one call."""
    kv_heads, group = queries.shape[1:3]
    both = rotary.rotate(torch.cat([queries.flatten(1, 2), keys], dim=1), positions)
    queries, keys = both.split([kv_heads * group, kv_heads], dim=1)
    return queries.unflatten(1, (kv_heads, group)), keys


def _scale_by_log_n(slab: Slab, queries: Tensor, segment: Segment) -> Tensor:
    """Multiply each query by log_512(n), n being the tokens it sees (BUZZ, section 3.5)."""
    position, start = slab.position, segment.start[:, None, None]
    before = ((position >= 0) & (position < start)).sum(dim=2, keepdim=True)
    n = before + torch.arange(1, segment.width + 1, device=position.device)
    factor = n.log() / math.log(512)
    return (queries * factor[:, :, None, :, None]).to(queries.dtype)


def mask_of_piece(
    positions: LayerPositions,
    slab: Slab,
    segment: Segment,
    stop: int,
    dtype: torch.dtype,
    *,
    in_step: bool,
) -> Tensor | None:
    """Compute the bias on the logits of a segment's queries over the first `stop` slots.

    With `in_step` all rows have one layout, and the segment's tokens are the last of the slots.
    Returns -inf for slots that a query must not see, broadcasting with [batch, kv_heads, group,
    width, slots]; None if every query sees every slot.
    """
    width, window = segment.width, positions.window
    bias: Tensor | None = None
    if not in_step:
        # A slot that waits for its token carries a position in the future.
        ahead = segment.positions[:, :, None, :, None] - slab.position[:, :, None, None, :stop]
        seen = (ahead >= 0) & segment.real[:, None, None, :, None]
        if window is not None:
            seen &= ahead < window
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
    elif width > 1 or (window is not None and stop > window):
        bias = _cached_band(width, stop, window, dtype, slab.position.device)
    return _add_alibi(bias, positions, slab, segment, stop)


def mask_of_step(
    positions: LayerPositions, slab: Slab, segment: Segment, ends: StepEnds, dtype: torch.dtype
) -> Tensor | None:
    """Compute the bias on the logits of one query a row, if rows end in different slots."""
    return _add_alibi(ends.mask(positions.window, dtype), positions, slab, segment, ends.stop)


def band(
    width: int, stop: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make the causal mask of the last `width` of `stop` tokens [1, 1, 1, width, stop]."""
    with torch.inference_mode(False):
        query = torch.arange(stop - width, stop, device=device)[:, None]
        ahead = query - torch.arange(stop, device=device)
        seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~seen, -torch.inf)[None, None, None]


_cached_band = lru_cache(maxsize=8)(band)


def _add_alibi(
    bias: Tensor | None, positions: LayerPositions, slab: Slab, segment: Segment, stop: int
) -> Tensor | None:
    """Add the layer's linear biases to a mask, if it has any."""
    if positions.alibi is None or slab.frame is None:
        return bias
    frame, position = slab.frame[:, :, :stop], slab.position[:, :, :stop]
    alibi = _alibi_bias(positions, positions.alibi, frame, position, segment)
    return alibi if bias is None else bias + alibi


def _alibi_bias(
    positions: LayerPositions, alibi: Alibi, frame: Tensor, position: Tensor, segment: Segment
) -> Tensor:
    """Compute ALiBi for slots at their places in the frame [batch, kv_heads, slots]."""
    first: Tensor | int = 0
    if positions.rolling and alibi.rounding is not None:
        far = torch.iinfo(frame.dtype).max
        first = frame.masked_fill(position < 0, far).amin(dim=2, keepdim=True)
    return alibi.bias(frame, frame.shape[1], first, segment.start[:, None, None])


def attend_prompt(
    spec: LayerSpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    params: AttentionParams,
    segment: Segment,
    answers: bool = True,
) -> tuple[Tensor, Slots]:
    """Answer every query of a prompt from all tokens before it; without `answers` they are zeros.

    Takes rotated queries [batch, kv_heads, group, width, key_dim], rotated keys and values [batch,
    kv_heads, width, dim]; rows may have fewer tokens. Returns answers [batch, kv_heads, group,
    width, value_dim], and the tokens.
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
        slots = AttendedSlots(k, v, None, weights, weights, None, 0, stop, plain=True)
        attend = select_attention(block, slots, params, bias, by="torch")
        outs.append(attend(block, slots, params, bias).answers)
    position = segment.positions.expand(-1, kv_heads, -1)
    shape = (*queries.shape[:-1], values.shape[3])
    out = torch.cat(outs, dim=3) if answers else values.new_zeros(shape)
    spans = None
    if spec.moves_on_axes:
        spans = segment.spans[:, None].expand(-1, kv_heads, -1, -1)
    return out, Slots(keys, values, zeros, zeros.clone(), position, received, spans)
