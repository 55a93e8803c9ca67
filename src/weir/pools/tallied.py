"""A ranked pool that remembers a number of each token it keeps, from one fold to the next.

For scores that are made once, while the tokens around are still there, or added up over the stream.
Knows nothing about what the numbers mean.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from weir.pools.base import Fold, left, split
from weir.pools.ranked import Choose, Ranked
from weir.slab import Slots

TALLY = "tally"
"""What the numbers are called in `Fold.state`."""


class Tallied(Ranked):
    """Keep the tokens of the highest score, and a number of each beside them.

    At every fold, also while there is room, `tally` says the numbers anew. While `score` is asked,
    `fold.state[TALLY]` has the number of each slot it is asked about.
    """

    @abstractmethod
    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """The numbers from now on [batch, kv_heads, slots], float32; finite where a token is.

        Args:
            slots: all tokens, those held and those that arrive, from the oldest on.
            before: the numbers so far, of the same shape; 0 for what arrives.
            fold: what a pool may know; `fold.state` is the pool's own.
        """

    def score(self, slots: Slots, fold: Fold) -> Tensor | tuple[Tensor, ...]:
        """The numbers themselves."""
        return fold.state[TALLY]

    def state(self, like: Slots) -> dict[str, Tensor]:
        """The number of each slot's token [batch, kv_heads, n], float32."""
        batch, heads = like.position.shape[:2]
        return {TALLY: like.a.new_zeros(batch, heads, self.slots())}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """Why tensors cannot be its state; see `Pool.wrong_state`."""
        wrong = [name for name, t in state.items() if not bool(t.isfinite().all())]
        return f"{wrong[0]} is not finite" if wrong else None

    def fold_by(self, choose: Choose, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """As `Ranked.fold_by`; the numbers go with the tokens."""
        both = held.join(new)
        before = fold.state[TALLY][:, :, : len(held)]
        before = torch.cat([before, new.a.new_zeros(new.a.shape)], dim=2)
        if not fold.unbroken:
            order = both.position.argsort(dim=2, stable=True)
            both, before = both.take_sorted(order), before.gather(2, order)
        tally = self.tally(both, before, fold).masked_fill(~both.held, 0.0)
        told = replace(fold, state={**fold.state, TALLY: tally})
        stays = self.stays(choose, both, told)
        kept, gone = split(both, stays)
        fold.state[TALLY] = left(tally, stays, self.slots())
        return kept, gone
