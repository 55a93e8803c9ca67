"""Uniform sampling: the baseline that BalanceKV and others are measured against.

BalanceKV (Kochetkova et al. 2025, "Streaming Attention Approximation via Discrepancy Theory",
arXiv:2502.07861), section 4.1 and appendix B.1, "independent uniform sampling". With a rate, each
token is kept with that probability. With a budget, that many of all tokens that came are kept, each
with the same probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, split
from weir.pools.parameters import Bounds, Count
from weir.pools.registry import pool
from weir.pools.sample import Sample
from weir.slab import Slots


@pool("uniform")
@dataclass(frozen=True)
class Uniform(Sample):
    """Keep a uniform sample of all tokens that arrive: a number of tokens, or a share of them.

    Attributes:
        n: number of tokens to keep; none if `rate` is given.
        rate: the probability with which each token is kept; none to keep a fixed number. With a
            rate, there is no limit: the number of slots grows with the stream.
        weighted: whether each kept token counts for (tokens that came) / n, or for 1 / rate, so
            that the numerator and the denominator of attention are unbiased and no token overflows.
            Otherwise weights do not change, and other tokens overflow.
        per_head: whether each KV head has a separate sample; otherwise all heads of a layer share
            one.
    """

    n: Count | None = None
    rate: Annotated[float, Bounds(0, 1, without=0)] | None = None
    weighted: bool = False
    per_head: bool = True

    def __post_init__(self) -> None:
        if (self.n is None) == (self.rate is None):
            given = "neither" if self.n is None else f"both, n={self.n} and rate={self.rate}"
            raise WeirError(
                f"uniform needs either a number of tokens or a rate, got {given}. Write "
                "uniform(64) or uniform(rate=0.25)."
            )

    @property
    def ends_pipe(self) -> bool:
        """Whether it is weighted, or its rate is 1, which keeps everything."""
        return super().ends_pipe or self.rate == 1

    def slots(self) -> int | None:
        """Return the number of tokens kept. None with a rate, which sets no limit."""
        return self.n

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the state of a weighted sample of `n` tokens; other samples need none."""
        return super().state(like) if self.weighted and self.n is not None else {}

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Keep tokens whose random number is below the rate, or is one of the `n` lowest."""
        if self.rate is not None:
            return self._by_rate(self.rate, held, new, fold)
        if self.weighted:
            fold.state["came"] = fold.state["came"] + new.held.sum(dim=2)
        both = self.came_with(held, fold).join(new)
        u = self.draw(both, fold).masked_fill(~both.held, torch.inf)
        lowest = u.argsort(dim=2, stable=True)[:, :, : self.n]
        stays = torch.zeros_like(both.held).scatter_(2, lowest, True) & both.held
        if self.weighted:
            return self.stand_for_all(both.only(stays), fold), new.part(0, 0)
        if not bool(stays[:, :, len(held) :].any()):
            return held, new
        return split(both, stays, fold)

    def _by_rate(self, rate: float, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        chosen = self.draw(new, fold) < rate
        if self.weighted:
            enters = replace(new, a=new.a - math.log(rate), b=new.b - math.log(rate))
            rest = new.part(0, 0)
        else:
            enters, rest = new, new.only(~chosen)
        if not bool((chosen & new.held).any()):
            return held, rest
        return held.join(enters).only(torch.cat([held.held, chosen], dim=2)), rest
