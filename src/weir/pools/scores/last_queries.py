"""Estimates of later queries from the last ones, and keys as attention reads them, for scores.

Expected Attention and TriAttention assume that later queries are like the last ones, but at the
next places of the stream. The mean of such queries, over queries and places, is the mean query
rotated by the mean rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Bounds
from weir.slab import Rotation, Slots

Ahead = Annotated[int, Bounds(1, 2**20)]
"""How many of the next places count. Pools use 64 by default, because by default a fold comes after
every 64 tokens.
"""


def keys_as_read(slots: Slots, fold: Fold) -> Tensor:
    """Return keys as attention reads them [batch, kv_heads, slots, key_dim], float32."""
    return (slots.keys if fold.read is None else fold.read.keys(slots)).float()


def last_unrotated_queries(fold: Fold, count: int) -> tuple[Tensor, Tensor]:
    """Return the last `count` queries without rotation, and which of them exist.

    Queries are [batch, kv_heads, group, n, key_dim], 0 where there was none; the mask is [batch,
    n], bool.
    """
    queries = fold.observed.unrotated_queries[:, :, :, -count:].float()
    there = fold.observed.query_positions[:, -count:] >= fold.origin
    return queries.masked_fill(~there[:, None, None, :, None], 0.0), there


def mean_query(queries: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of `last_unrotated_queries`, and the number of queries.

    The mean is [batch, kv_heads, group, key_dim]. The number is [batch, 1, 1, 1], float32, at least
    1.
    """
    count = there.sum(dim=1).clamp_min(1)[:, None, None, None].float()
    return queries.sum(dim=3) / count, count


def mean_rotation(fold: Fold, ahead: Sequence[int]) -> Rotation | None:
    """Return the mean of the rotations at the next place plus each number in `ahead`. None without
    a rotary embedding.

    Cosines and sines are [batch, 1, 1, rotary_dim / 2].
    """
    rotary = fold.observed.positions.rotary
    if rotary is None:
        return None
    steps = torch.tensor(ahead, device=fold.next.device)
    turn = rotary.rotation_at(fold.next[:, None, None] + steps)
    return Rotation(turn.cos.mean(dim=2, keepdim=True), turn.sin.mean(dim=2, keepdim=True))


def rotate_back(keys: Tensor, turn: Rotation | None) -> Tensor:
    """Apply the transpose of a mean rotation to keys [batch, kv_heads, n, key_dim], float32."""
    return keys if turn is None else Rotation(turn.cos, -turn.sin).apply(keys)
