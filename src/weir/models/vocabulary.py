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
        wrong = low if low < 0 else high
        raise WeirError(f"token id {wrong} is out of range; the model knows 0 to {vocabulary - 1}")
