"""Who sees whom: what is added to the logits of queries over the slots of a layer.

Causality, sliding windows, rows of different length, and linear biases by distance. Knows nothing
about weights, pools or when a layer folds.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from weir.cache.layer.plan import Piece
from weir.slab import Alibi, Place, Slab


def sight(
    place: Place, slab: Slab, piece: Piece, stop: int, dtype: torch.dtype, *, even: bool
) -> Tensor | None:
    """What is added to the logits of a piece's queries over the first `stop` slots.

    Args:
        place: what the layer knows about positions.
        slab: the slots, the tokens of the piece among them.
        piece: the queries' tokens.
        stop: slots of the longest row.
        dtype: of a mask without biases.
        even: all rows lie alike, and the piece's tokens are the last of the `stop` slots.

    Returns:
        -inf where a query must not look, broadcasts with [batch, kv_heads, group, width, slots];
        None where every query sees everything.
    """
    width, window = piece.width, place.window
    bias: Tensor | None = None
    if not even:
        # A slot that waits for its token carries a position in the future.
        ahead = piece.positions[:, :, None, :, None] - slab.position[:, :, None, None, :stop]
        seen = (ahead >= 0) & piece.real[:, None, None, :, None]
        if window is not None:
            seen &= ahead < window
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
    elif width > 1 or (window is not None and stop > window):
        bias = _kept_band(width, stop, window, dtype, slab.position.device)
    if place.alibi is not None and slab.frame is not None:
        frame, position = slab.frame[:, :, :stop], slab.position[:, :, :stop]
        tilt = _tilt(place, place.alibi, frame, position, piece)
        bias = tilt if bias is None else bias + tilt
    return bias


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


_kept_band = lru_cache(maxsize=8)(band)


def _tilt(place: Place, alibi: Alibi, frame: Tensor, position: Tensor, piece: Piece) -> Tensor:
    """ALiBi of slots at the places that the frame gives them [batch, kv_heads, slots]."""
    first: Tensor | int = 0
    if place.rolling and alibi.rounding is not None:
        far = torch.iinfo(frame.dtype).max
        first = frame.masked_fill(position < 0, far).amin(dim=2, keepdim=True)
    return alibi.bias(frame, frame.shape[1], first, piece.start[:, None, None])
