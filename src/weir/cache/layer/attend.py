"""Queries and keys put in their places, and the slab read.

Between the layer, which knows what has come, and the formula, which knows nothing but tensors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from weir import kernels
from weir.cache.layer.plan import Piece
from weir.cache.layer.queries import AT_ONCE
from weir.cache.layer.spec import LayerSpec
from weir.slab import (
    Form,
    Rotary,
    Slab,
    Watched,
    fused_attention,
    fuses,
    split_attention,
    two_weight_attention,
    two_weight_kernel,
    watched_attention,
)


def in_place(
    spec: LayerSpec, slab: Slab, queries: Tensor, keys: Tensor, piece: Piece
) -> tuple[Tensor, Tensor]:
    """Queries and keys at their places in the stream, as attention is to see them.

    Args:
        spec: the layer.
        slab: its slots, before the piece is in them.
        queries: [batch, kv_heads, group, width, key_dim].
        keys: [batch, kv_heads, width, key_dim].
        piece: their tokens.
    """
    if spec.positions.rotary is not None and not spec.positions.placed:
        queries, keys = _rotated(spec.positions.rotary, queries, keys, piece.positions)
    if spec.pipe.log_n:
        queries = _sharpened(slab, queries, piece)
    return queries, keys


def read(
    spec: LayerSpec,
    slab: Slab,
    queries: Tensor,
    form: Form,
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
    if causal and fuses(form) and form.sinks is None:
        kernel = kernels.causal(queries, slab.values)
        if kernel is not None:
            mask, factors = None, None
            if slab.split is not None and not plain:
                mask, *factors = (t[:, :, start:stop] for t in slab.split)
            elif not plain:
                mask = slab.b[:, :, start:stop]
            exact, coded = _as_stored(slab, slots)
            answers: Tensor = kernel(queries, *exact, mask, form.scale, factors, coded)
            return answers
    out = _by_kernel(slab, queries, form, bias, slots, plain=plain)
    if out is not None:
        return out
    if bias is not None and start and bias.shape[4] > 1:
        bias = bias[..., start:]
    keys, values = slab.read(start, stop)
    each = two_weight_kernel(queries)
    if each or not fuses(form):
        return (each or two_weight_attention)(
            queries, keys, values, slab.a[:, :, start:stop], slab.b[:, :, start:stop], form, bias
        )
    if not plain:
        if slab.split is not None:
            mask, above, below = (t[:, :, start:stop] for t in slab.split)
            return split_attention(queries, keys, values, mask, above, below, form, bias)
        below = slab.b[:, :, None, None, start:stop]
        bias = below if bias is None else bias + below
    return fused_attention(queries, keys, values, form, bias)


def watch(
    spec: LayerSpec,
    slab: Slab,
    queries: Tensor,
    form: Form,
    bias: Tensor | None,
    slots: tuple[int, int],
) -> Watched | None:
    """`read` of a whole tail that folds next, with what the fold is going to ask about it.

    Args:
        spec, slab, queries, form, bias, slots: as for `read`, of rows that all lie alike.

    Returns:
        What all slots from slot 0 on received, and where pools need them shares of these slots.
        None where that would be slower than to ask for it in the fold, or hold more at once; `read`
        serves everything.
    """
    whole_tail = queries.shape[3] == spec.chunk and queries.dtype == torch.float32
    start, stop = slots
    fits = queries.shape[:4].numel() * stop <= AT_ONCE
    plain = fuses(form) and form.sinks is None and slab.split is None
    if not (whole_tail and fits and plain and queries.device.type == "cpu"):
        return None
    everywhere = spec.positions.window is not None or spec.positions.alibi is not None
    kernel, b = kernels.causal_and_received(queries, slab.values), slab.b[:, :, start:stop]
    watched = None
    if kernel is not None and not spec.pipe.needs_shares and not everywhere:
        exact, coded = _as_stored(slab, slots)
        counted = kernel(queries, *exact, b, form.scale, coded)
        watched = None if counted is None else Watched(*counted)
    if watched is None:
        if bias is not None and bias.shape[4] > 1:
            # Of rows that lie alike, a query sees whatever lies in front of the tail.
            bias = bias[..., start if everywhere else -spec.chunk :]
        watched = watched_attention(queries, *slab.read(start, stop), b, form, bias)
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
    coded = None
    if slab.coded is not None and start < slab.first:
        coded = slab.coded.bytes_of(start, slab.first)
    return slab.read(start if coded is None else slab.first, stop), coded


def _by_kernel(
    slab: Slab,
    queries: Tensor,
    form: Form,
    bias: Tensor | None,
    slots: tuple[int, int],
    *,
    plain: bool,
) -> Tensor | None:
    """`read` by a kernel that takes slots as they lie; None where there is none.

    It takes one query a head, logits without a cap or sinks, and one weight for each slot.
    """
    if queries.shape[3] != 1 or not fuses(form) or form.sinks is not None:
        return None
    biased = bias is not None and bias.shape[2] > 1
    if biased or (slab.split is not None and not plain):
        return None
    first = slab.first
    coded = slab.coded if slots[0] < first else None
    if coded is None:
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
    if coded is not None:
        out: Tensor = kernel(queries, coded.stored, *exact, mask, form.scale, slots)
        return out
    mask = mask if mask is None else mask[:, :, first:]
    out = kernel(queries, *exact, mask, form.scale, (slots[0] - first, slots[1] - first))
    return out


def _rotated(
    rotary: Rotary, queries: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys of a piece at its positions, in one go."""
    kv_heads, group = queries.shape[1:3]
    both = rotary.rotate(torch.cat([queries.flatten(1, 2), keys], dim=1), positions)
    queries, keys = both.split([kv_heads * group, kv_heads], dim=1)
    return queries.unflatten(1, (kv_heads, group)), keys


def _sharpened(slab: Slab, queries: Tensor, piece: Piece) -> Tensor:
    """Queries times log_512(n), n being the tokens that each sees (BUZZ, section 3.5)."""
    position, start = slab.position, piece.start[:, None, None]
    before = ((position >= 0) & (position < start)).sum(dim=2, keepdim=True)
    n = before + torch.arange(1, piece.width + 1, device=position.device)
    factor = n.log() / math.log(512)
    return (queries * factor[:, :, None, :, None]).to(queries.dtype)
