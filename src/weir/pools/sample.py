"""What samples of the middle have in common: their draws, and weights that make them unbiased.

A sample of n out of N tokens that came in, each with the same chance, gives unbiased sums when
every token of it counts N/n times. A token that came in with a weight (from a pool that already
made it stand for others) counts N/n times that. What is remembered is therefore the weight a token
came with; the factor is put on anew at each fold, so no rounding adds up however long the stream.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.pools.base import MOST_WEIGHT, Fold, Pool, is_within
from weir.slab import Slots


class Sample(Pool):
    """A pool that keeps a uniform sample of all that ever came in.

    Attributes:
        weighted: each token kept counts for those that were not, so that both sums of attention are
            unbiased; nothing flows on. Otherwise weights stay as they came.
        per_head: each KV head has a sample of its own; otherwise a token is given the same
            number in all heads of a layer.
    """

    weighted: bool
    per_head: bool

    @property
    def ends_pipe(self) -> bool:
        """True with weights: what is kept stands for the rest."""
        return self.weighted

    @abstractmethod
    def slots(self) -> int | None:
        """As many slots as tokens are kept."""

    def state(self, like: Slots) -> dict[str, Tensor]:
        """`came`, tokens that came in so far [batch, kv_heads], int64; and if the sample is
        weighted `a` and `b`, the log-weights with which those it keeps did [batch, kv_heads, n].
        """
        shape = like.position.shape[:2]
        state = {"came": like.position.new_zeros(shape)}
        if self.weighted:
            for name in ("a", "b"):
                state[name] = like.a.new_full((*shape, self.slots() or 0), -torch.inf)
        return state

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """Why tensors cannot be its state; see `Pool.wrong_state`."""
        if "came" in state and not is_within(state["came"], 0, ahead):
            return "came is not a number of tokens"
        for name in ("a", "b"):
            if name in state and not is_within(state[name], -math.inf, MOST_WEIGHT):
                return f"{name} is not a log-weight"
        return None

    def draw(self, slots: Slots, fold: Fold) -> Tensor:
        """A uniform number in [0, 1) for each token [batch, kv_heads, slots], float64; the same
        one whenever it is asked for.
        """
        position = slots.position
        if self.per_head:
            return fold.draws.uniform(0, position)
        # As one head, so that a token's number does not depend on the head it is in.
        return fold.draws.of_layer().uniform(0, position.flatten(1)[:, None]).view(position.shape)

    def came_with(self, held: Slots, fold: Fold) -> Slots:
        """What is held, with the weights its tokens came in with."""
        if not self.weighted:
            return held
        a, b = (fold.state[name][:, :, : len(held)] for name in ("a", "b"))
        return replace(held, a=a, b=b)

    def stand_for_all(self, kept: Slots, fold: Fold) -> Slots:
        """What is kept, weighed for all that came in; `kept` has the weights its tokens came with.

        Each counts for came / n tokens, or for itself as long as no more than n came.
        """
        share = fold.state["came"].double() / (self.slots() or 1)
        return self.weigh(kept, share.clamp_min(1.0).log()[..., None], fold)

    def weigh(self, kept: Slots, factor: Tensor, fold: Fold) -> Slots:
        """What is kept, each counting for e^factor times what it came with, which is remembered.

        Args:
            kept: with the weights its tokens came with.
            factor: [batch, kv_heads, slots or 1], finite where a token is.
            fold: whose state remembers.
        """
        free = (self.slots() or 0) - len(kept)
        for name in ("a", "b"):
            fold.state[name] = F.pad(getattr(kept, name), (0, free), value=-torch.inf)
        factor = factor.to(kept.a.dtype)
        return replace(kept, a=kept.a + factor, b=kept.b + factor)
