"""What the last queries attended to, for scores that ask them. Knows no score."""

from __future__ import annotations

from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold
from weir.slab import Slots


def attended(slots: Slots, fold: Fold, window: int) -> Tensor:
    """Shares of the attention of the last queries [batch, kv_heads, group, window, slots], float32.

    Of all that a query gave, to tokens in other pools too, as it was given: at the distances at
    which attention reads (`Reading`). 0 for tokens newer than the query, and from queries that
    there were none of yet.

    Args:
        slots: of the pool, in any order.
        fold: of a pool that says so many in `needs_queries`.
        window: how many of the last queries.
    """
    assert fold.read is not None
    return fold.read.attention(slots)[:, :, :, -window:]


def keys_as_read(slots: Slots, fold: Fold) -> Tensor:
    """Keys at the distances at which attention reads them; as said for slots that lie in no layer.

    Returns:
        [batch, kv_heads, slots, key_dim], float32.
    """
    return (slots.keys if fold.read is None else fold.read.keys(slots)).float()


def logits(slots: Slots, fold: Fold, window: int) -> Tensor:
    """Logits of the last queries, as `attended`; `-inf` where its share is 0."""
    assert fold.read is not None
    lse = fold.read.lse[:, :, :, -window:, None]
    return attended(slots, fold, window).log() + lse.nan_to_num(neginf=0.0)


def check_window(name: str, window: int) -> None:
    """Refuse a number of queries that is none.

    Raises:
        WeirError: by the pool's name.
    """
    if window < 1:
        raise WeirError(f"at least the last query is asked in {name}, not the last {window}")


def check_kernel(name: str, kernel: int) -> None:
    """Refuse neighborhoods without a token in their middle.

    Raises:
        WeirError: by the pool's name.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise WeirError(
            f"the kernel of {name} has a token in its middle, so it is odd and at least 1, not "
            f"{kernel}"
        )


def check_share(name: str, parameter: str, value: float) -> None:
    """Refuse what is no share of something.

    Raises:
        WeirError: by the pool's name.
    """
    if not 0 <= value <= 1:
        raise WeirError(f"{parameter} of {name} is a share, from 0 to 1, not {value:g}")
