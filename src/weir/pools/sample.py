"""The base of pools that sample: their draws, and weights that make them unbiased.

A sample of n out of N tokens, each with the same chance, gives unbiased sums if every token of it
counts N/n times what it arrived with. The state has the weight each token arrived with, and the
factor is applied anew at each fold, so that rounding never adds up.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.pools.base import LOG_WEIGHT, Fold, Pool, find_outside
from weir.slab import Slots


class Sample(Pool):
    """A pool that keeps a sample of all that ever came in.

    Attributes:
        weighted: whether the tokens kept count for those that were not, so that both sums of
            attention are unbiased and nothing flows on. Otherwise weights stay as they came.
        per_head: whether each KV head has a sample of its own.
    """

    weighted: bool
    per_head: bool

    @property
    def ends_pipe(self) -> bool:
        """Whether it is weighted: then its slots stand for everything that came."""
        return self.weighted

    @property
    def drops(self) -> bool:
        """Whether weights stay as they came: otherwise they stand for everything that came."""
        return not self.weighted

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make `came`, the tokens that arrived so far [batch, kv_heads], int64; if the sample is
        weighted also `a` and `b`, the log-weights its tokens arrived with [batch, kv_heads, n].
        """
        shape = like.position.shape[:2]
        state = {"came": like.position.new_zeros(shape)}
        if self.weighted:
            for name in ("a", "b"):
                state[name] = like.a.new_full((*shape, self.slots() or 0), -torch.inf)
        return state

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        return find_outside(state, came=(0, ahead), a=LOG_WEIGHT, b=LOG_WEIGHT)

    def draw(self, slots: Slots, fold: Fold) -> Tensor:
        """Draw each token's uniform number, always the same [batch, kv_heads, slots], float64."""
        position = slots.position
        if self.per_head:
            return fold.draws.uniform(0, position)
        # All heads as one, so that a token has the same number in each.
        return fold.draws.of_layer().uniform(0, position.flatten(1)[:, None]).view(position.shape)

    def came_with(self, held: Slots, fold: Fold) -> Slots:
        """Return the held slots with the weights their tokens arrived with."""
        if not self.weighted:
            return held
        a, b = (fold.state[name][:, :, : len(held)] for name in ("a", "b"))
        return replace(held, a=a, b=b)

    def stand_for_all(self, kept: Slots, fold: Fold) -> Slots:
        """Weigh the kept slots, with the weights they arrived with, for all of `came`.

        Each token counts for came / n tokens, or for itself while no more than n have come.
        """
        share = fold.state["came"].double() / (self.slots() or 1)
        return self.weigh(kept, share.clamp_min(1.0).log()[..., None], fold)

    def weigh(self, kept: Slots, factor: Tensor, fold: Fold) -> Slots:
        """Multiply the weights that kept tokens arrived with by e^factor, and remember them; the
        factor is [batch, kv_heads, slots or 1], finite where a token is.
        """
        free = (self.slots() or 0) - len(kept)
        for name in ("a", "b"):
            fold.state[name] = F.pad(getattr(kept, name), (0, free), value=-torch.inf)
        factor = factor.to(kept.a.dtype)
        return replace(kept, a=kept.a + factor, b=kept.b + factor)
