"""Who sees whom: what is added to the logits of queries over the slots of a layer.

Causality, sliding windows, rows of different length, and linear biases by distance. Knows nothing
about weights, pools or when a layer folds.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from weir.cache.layer.plan import Segment, StepEnds
from weir.slab import Alibi, LayerPositions, Slab


def mask_of_piece(
    positions: LayerPositions,
    slab: Slab,
    segment: Segment,
    stop: int,
    dtype: torch.dtype,
    *,
    in_step: bool,
) -> Tensor | None:
    """What is added to the logits of a segment's queries over the first `stop` slots.

    Args:
        positions: what the layer knows about them.
        slab: the slots, the tokens of the segment among them.
        segment: the queries' tokens.
        stop: slots of the longest row.
        dtype: of a mask without biases.
        in_step: all rows lie alike, and the segment's tokens are the last of the `stop` slots.

    Returns:
        -inf where a query must not look, broadcasts with [batch, kv_heads, group, width, slots];
        None where every query sees everything.
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
    return _tilted(bias, positions, slab, segment, stop)


def mask_of_step(
    positions: LayerPositions, slab: Slab, segment: Segment, ends: StepEnds, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the logits of one query of each row, whose rows end in different slots.

    Args:
        positions: what the layer knows about them.
        slab: the slots, the token of each row among them.
        segment: one token of each row.
        ends: the slots of those tokens; what lies behind its own a row does not see.
        dtype: of a mask without biases.

    Returns:
        As `mask_of_piece`, over the slots up to the last of `ends`.
    """
    return _tilted(ends.mask(positions.window, dtype), positions, slab, segment, ends.stop)


def band(
    width: int, stop: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask of the last `width` of `stop` tokens in a row [1, 1, 1, width, stop]."""
    with torch.inference_mode(False):
        query = torch.arange(stop - width, stop, device=device)[:, None]
        ahead = query - torch.arange(stop, device=device)
        seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~seen, -torch.inf)[None, None, None]


_cached_band = lru_cache(maxsize=8)(band)


def _tilted(
    bias: Tensor | None, positions: LayerPositions, slab: Slab, segment: Segment, stop: int
) -> Tensor | None:
    """A mask, and on it the layer's linear biases, where it has them."""
    if positions.alibi is None or slab.frame is None:
        return bias
    frame, position = slab.frame[:, :, :stop], slab.position[:, :, :stop]
    tilt = _tilt(positions, positions.alibi, frame, position, segment)
    return tilt if bias is None else bias + tilt


def _tilt(
    positions: LayerPositions, alibi: Alibi, frame: Tensor, position: Tensor, segment: Segment
) -> Tensor:
    """ALiBi of slots at the places that the frame gives them [batch, kv_heads, slots]."""
    first: Tensor | int = 0
    if positions.rolling and alibi.rounding is not None:
        far = torch.iinfo(frame.dtype).max
        first = frame.masked_fill(position < 0, far).amin(dim=2, keepdim=True)
    return alibi.bias(frame, frame.shape[1], first, segment.start[:, None, None])
