"""The base of pools that sample: their draws, and weights that make them unbiased.

A sample of n out of N tokens with equal probabilities gives unbiased sums if every token in it
counts N/n times its original weight. The state has each token's original weight, and the factor is
applied again at each fold, so that rounding never accumulates.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.pools.base import LOG_WEIGHT, Fold, Pool, find_outside
from weir.slab import Slots


class Sample(Pool):
    """A pool that keeps a sample of all tokens that ever arrived.

    Attributes:
        weighted: whether kept tokens also count for the others, so that the numerator and the
            denominator of attention are unbiased and no token moves on to a next pool. Otherwise
            weights do not change.
        per_head: whether each KV head has a separate sample.
    """

    weighted: bool
    per_head: bool

    @property
    def heads_agree(self) -> bool:
        """Whether all heads have the same sample."""
        return not self.per_head

    @property
    def ends_pipe(self) -> bool:
        """Whether it is weighted, so that its slots represent all tokens that came."""
        return self.weighted

    @property
    def drops(self) -> bool:
        """Whether weights do not change, so that a token can be dropped. The weights of a weighted
        sample represent all tokens that came.
        """
        return not self.weighted

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make `came`, the number of tokens that arrived so far [batch, kv_heads], int64.

        A weighted sample also has `a` and `b`, the original log-weights of its tokens [batch,
        kv_heads, n].
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
        """Draw a uniform number for each token [batch, kv_heads, slots], float64. A token gets the
        same number in every fold.
        """
        position = slots.position
        if self.per_head:
            return fold.draws.uniform(0, position)
        # All heads as one, so that a token has the same number in each.
        return fold.draws.of_layer().uniform(0, position.flatten(1)[:, None]).view(position.shape)

    def came_with(self, held: Slots, fold: Fold) -> Slots:
        """Return the held slots with the original weights of their tokens."""
        if not self.weighted:
            return held
        a, b = (fold.state[name][:, :, : len(held)] for name in ("a", "b"))
        return replace(held, a=a, b=b)

    def stand_for_all(self, kept: Slots, fold: Fold) -> Slots:
        """Weigh the kept slots, starting from their original weights, so that they represent all
        tokens that came.

        Each token counts for came / n tokens, or for itself while at most n have come.
        """
        share = fold.state["came"].double() / (self.slots() or 1)
        return self.weigh(kept, share.clamp_min(1.0).log()[..., None], fold)

    def weigh(self, kept: Slots, factor: Tensor, fold: Fold) -> Slots:
        """Multiply the original weights of kept tokens by e^factor, and save the original weights.

        The factor is [batch, kv_heads, slots or 1], finite where there is a token.
        """
        free = (self.slots() or 0) - len(kept)
        for name in ("a", "b"):
            fold.state[name] = F.pad(getattr(kept, name), (0, free), value=-torch.inf)
        factor = factor.to(kept.a.dtype)
        return replace(kept, a=kept.a + factor, b=kept.b + factor)
