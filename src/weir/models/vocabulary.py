"""Which token ids a model knows. Knows nothing about what they say or where they come from."""

from __future__ import annotations

from torch import Tensor

from weir.errors import WeirError


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Refuse token ids of any shape, one or more, that a model has no embedding of.

    Args:
        ids: whole numbers.
        vocabulary: ids run from 0 to this, exclusive.

    Raises:
        WeirError: one of them is out of range.
    """
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise out_of_range(low if low < 0 else high, vocabulary)


def out_of_range(token: int, vocabulary: int, where: str = "") -> WeirError:
    """What is to be said of a token id that a model has no embedding of; `where` in front."""
    return WeirError(
        f"{where}token id {token} is out of range; the model knows 0 to {vocabulary - 1}"
    )
