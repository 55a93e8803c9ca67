"""Tokens that came before are made less likely: the repetition penalty of CTRL.

Keskar et al. 2019, "CTRL: A Conditional Transformer Language Model for Controllable Generation",
section 4.1, as transformers has it for logits of either sign. Knows nothing about models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

import torch
from torch import Tensor

from weir.errors import WeirError, quote


def check_penalty(penalty: object) -> None:
    """Refuse what nothing can be divided by.

    Raises:
        WeirError: it is no number over 0.
    """
    is_number = isinstance(penalty, Real) and not isinstance(penalty, bool)
    if not is_number or not 0 < float(penalty) < math.inf:  # type: ignore[arg-type]
        raise WeirError(f"repetition_penalty must be a number over 0, not {quote(penalty)}")


class Repetition:
    """Tokens that came before, and logits in which they are less likely.

    Args:
        penalty: over 1 makes them less likely, 1 leaves them.
        before: the tokens.
    """

    def __init__(self, penalty: float, before: Iterable[int] = ()) -> None:
        self._penalty = penalty
        self._known = set(before)
        # Kept from step to step: of many tokens it takes tens of milliseconds to make it.
        self._index = torch.tensor(sorted(self._known), dtype=torch.int64)

    def add(self, token: int) -> None:
        """One more has come."""
        if token not in self._known:
            self._known.add(token)
            self._index = torch.cat([self._index, self._index.new_tensor([token])])

    def penalized(self, logits: Tensor) -> Tensor:
        """Logits with those of the tokens divided where they are positive, multiplied where not.

        Args:
            logits: of the tokens that may come next [..., vocabulary]; they stay as they are.
        """
        self._index = index = self._index.to(logits.device)
        some = logits[..., index]
        changed = logits.clone()
        changed[..., index] = torch.where(some > 0, some / self._penalty, some * self._penalty)
        return changed
