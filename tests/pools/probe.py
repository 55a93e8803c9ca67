"""A pool that keeps what chance says and takes down what it is told: for tests of folds.

It is in no policy's words; a pipe that holds one is made in Python.
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
    """Keep `n` tokens drawn by place and head, so that gaps open everywhere in the front.

    Attributes:
        n: how many tokens are kept.
        needs_queries: how many of the last queries it asks for.
        told: what `look` made of each fold: (slots, fold) before they are ranked.
        look: told each fold.
    """

    name: ClassVar[str] = "probe"

    n: int
    needs_queries: int = 0
    look: Callable[[Slots, Fold], Any] = field(default=lambda slots, fold: None, compare=False)
    told: list[Any] = field(default_factory=list, compare=False)

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """As any ranked pool; what is looked at are all tokens it holds and gets."""
        self.told.append(self.look(fold.in_order(held, new), fold))
        return super().fold(held, new, fold)

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """The same number for a token of a head whenever it is asked about."""
        head = torch.arange(slots.position.shape[1])[None, :, None]
        return ((slots.position + 7 * head) * 2654435761 % 1009).float()
