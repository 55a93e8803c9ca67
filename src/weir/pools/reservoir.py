"""A reservoir: keep every token that ever left the window with the same probability.

"An Experiment of Implementing Reservoir Sampling to StreamingLLM", section 4: the n-th token of the
middle (between the sinks and the window) is kept with probability p = s/n and then replaces one of
the s samples, each with probability q = 1/s. Otherwise it is dropped. This is Algorithm R. (The
code of the paper's Figure 2 samples again from the tokens that are still cached, which favors newer
tokens.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weir.pools.base import Fold, SizedPool
from weir.pools.registry import pool
from weir.pools.sample import Sample
from weir.slab import Slots


@pool("reservoir")
@dataclass(frozen=True)
class Reservoir(SizedPool, Sample):
    """Keep a uniform sample of all tokens that arrive, by Algorithm R.

    Attributes:
        n: number of tokens to keep.
        weighted: whether each kept token counts for (tokens that came) / n, so that the numerator
            and the denominator of attention are unbiased and no token overflows. Otherwise weights
            do not change, and dropped and replaced tokens overflow, as in the paper.
        per_head: whether each KV head has a separate sample; in the paper, all heads of a layer
            share one.
    """

    n: int
    weighted: bool = False
    per_head: bool = False

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Admit arrivals as if one after the other.

        One number u in [0, 1) decides both draws of the n-th token: u < s/n admits it, and then the
        integer part of u·n is uniform among the places 0 to s - 1.
        """
        came = fold.state["came"]
        nth = came[..., None] + new.held.cumsum(dim=2)
        place = torch.where(nth <= self.n, nth - 1, (self.draw(new, fold) * nth).long())
        nowhere = ~new.held | (place >= self.n)
        place = place.masked_fill(nowhere, self.n)
        came = came + new.held.sum(dim=2)
        fold.state["came"] = came
        # If several arrivals take the same place, the last one keeps it.
        arrival = torch.arange(len(new), device=place.device).expand_as(place)
        winner = place.new_full((*came.shape, self.n + 1), -1)
        winner = winner.scatter_reduce(2, place, arrival, "amax")[:, :, : self.n]
        if not self.weighted and not bool((winner >= 0).any()):
            return held, new
        old = torch.arange(self.n, device=place.device)
        old = old.masked_fill(old >= len(held), -1)
        index = torch.where(winner >= 0, len(held) + winner, old)
        index = index[:, :, : int(came.max())]
        both = self.came_with(held, fold).join(new)
        kept = both.take(index)
        if self.weighted:
            return self.stand_for_all(kept, fold), new.part(0, 0)
        # A head with an empty place (index -1) has lost no token yet. Its slot 0 is kept anyway, so
        # clamping the index to 0 changes nothing.
        gone = torch.ones_like(both.held).scatter_(2, index.clamp_min(0), False)
        return kept, both.only(gone)
