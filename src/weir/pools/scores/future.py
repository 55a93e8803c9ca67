"""Queries that have been, asked again at places that are to come. Knows no score.

Scores that look ahead, Expected Attention and TriAttention, take the queries to come for those of
the last time, at the next places of the stream. A query's rotation does not change with what it
asks, so the mean over queries and over places is the mean query, turned by the mean rotation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold
from weir.slab import Rotation


def last_unrotated(fold: Fold, count: int) -> tuple[Tensor, Tensor]:
    """The last queries without their rotation, float32, and which of them there were.

    Args:
        fold: of a pool that says so many in `needs_queries`.
        count: how many.

    Returns:
        [batch, kv_heads, group, n, key_dim], 0 where there was none; [batch, n], bool.
    """
    assert fold.read is not None
    queries = fold.read.unrotated_queries[:, :, :, -count:].float()
    there = fold.read.query_positions[:, -count:] >= fold.origin
    return queries.masked_fill(~there[:, None, None, :, None], 0.0), there


def mean_query(queries: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of queries, and of how many it is.

    Args:
        queries, there: of `last_unrotated`.

    Returns:
        [batch, kv_heads, group, key_dim]; [batch, 1, 1, 1], float32, at least 1.
    """
    count = there.sum(dim=1).clamp_min(1)[:, None, None, None].float()
    return queries.sum(dim=3) / count, count


def mean_turn(fold: Fold, ahead: Sequence[int]) -> Rotation | None:
    """The mean rotation of places to come; None for a layer that rotates nothing.

    Args:
        fold: says which place is next.
        ahead: so many places behind the next one.

    Returns:
        Cosines and sines [batch, 1, 1, rotary_dim / 2].
    """
    assert fold.read is not None
    rotary = fold.read.positions.rotary
    if rotary is None:
        return None
    steps = torch.tensor(ahead, device=fold.next.device)
    turn = rotary.turns(fold.next[:, None, None] + steps)
    return Rotation(turn.cos.mean(dim=2, keepdim=True), turn.sin.mean(dim=2, keepdim=True))


def turned_back(keys: Tensor, turn: Rotation | None) -> Tensor:
    """Keys as a query without rotation would meet them: the transpose of a mean rotation on them.

    Args:
        keys: [batch, kv_heads, n, key_dim], float32.
        turn: of `mean_turn`.
    """
    return keys if turn is None else Rotation(turn.cos, -turn.sin).of(keys)


def check_ahead(name: str, ahead: int) -> None:
    """Refuse a look ahead at no place.

    Raises:
        WeirError: by the pool's name.
    """
    if not 1 <= ahead <= 1 << 20:
        raise WeirError(
            f"{name} looks 1 to {1 << 20:,} places ahead, not {ahead}; a fold's chunk is 64"
        )
