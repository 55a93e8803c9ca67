"""A pool for tests of folds. It keeps pseudo-random tokens, and records what it is given.

It is not registered, so a policy's text cannot name it. Pipes with it are made in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from weir.pools import Fold, Ranked
from weir.slab import Slots


@dataclass(frozen=True)
class Probe(Ranked):
    """Keep `n` tokens by a hash of position and head, so that the front has gaps everywhere.

    Attributes:
        n: how many tokens are kept.
        needs_queries: how many of the last queries it asks for.
        told: what `look` returned for each fold.
        look: called with (slots, fold) at each fold, before the slots are ranked.
    """

    name: ClassVar[str] = "probe"

    n: int
    needs_queries: int = 0
    look: Callable[[Slots, Fold], Any] = field(default=lambda slots, fold: None, compare=False)
    told: list[Any] = field(default_factory=list, compare=False)

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Call `look` with all tokens that the pool holds and gets, and fold as any ranked pool."""
        self.told.append(self.look(fold.in_order(held, new), fold))
        return super().fold(held, new, fold)

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return a number that depends only on a token's position and head."""
        head = torch.arange(slots.position.shape[1])[None, :, None]
        return ((slots.position + 7 * head) * 2654435761 % 1009).float()
