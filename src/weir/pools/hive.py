"""A beehive over the past: of every few neighbors, keep the one that got the most attention.

BUZZ (Zhao et al. 2024, "BUZZ: Beehive-structured Sparse KV Cache with Segmented Heavy Hitters for
Efficient LLM Inference", arXiv:2410.23079), section 3.3, Algorithms 1 and 2: when there is one
token more than the threshold, the *new* tokens, which arrived since the last eviction, are cut into
segments, and the token with the most attention in each segment stays (local maxima). Of the *old*
tokens, which survived earlier evictions, one in every few stays (interval sampling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.kernels import ALIKE
from weir.pools.base import Fold, SizedPool, find_outside, split
from weir.pools.registry import pool
from weir.slab import EMPTY, Slots

_LAST = torch.iinfo(torch.int64).max


@pool("hive")
@dataclass(frozen=True)
class Hive(SizedPool):
    """Keep local maxima of the attention: BUZZ's beehive.

    Attention is summed over all queries since a token arrived and over the query heads of its
    group. Each KV head keeps its tokens separately. An eviction comes whenever there is one token
    more than the threshold, however many tokens arrive at a fold.

    Attributes:
        threshold: number of tokens it holds before it evicts (T); at least the stride.
        stride: one of this many new neighbors is kept (s), and one of every floor((s + 1) / 2) old
            ones. At least 3: a stride of 2 would keep every old token forever.
        swapped: whether to thin old tokens by the stride and cut new ones into segments of half of
            it, the ablation of section 4.3.
        local_max: whether to keep the token with the most attention of a segment; false for the
            ablation that keeps the first.
        log_n: whether to scale the logits of the whole layer by log_512(n), where n is the number
            of tokens that a query sees (section 3.5); the policy is then not exact below its
            budget.
    """

    drops = True
    is_stochastic = False
    needs_mass = True

    threshold: int
    stride: int = 5
    swapped: bool = False
    local_max: bool = True
    log_n: bool = False

    def __post_init__(self) -> None:
        _check_stride(self.stride)
        if self.threshold < self.stride:
            raise WeirError(
                f"threshold must be at least the stride, {self.stride}, got {self.threshold}. Use "
                "a larger threshold or a smaller stride."
            )

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make `settled`, the place of the newest token that went through an eviction.

        It is [batch, kv_heads, 1]; -1 for none. Tokens up to it are old, and tokens beyond it are
        new.
        """
        return {"settled": like.position.new_full((*like.position.shape[:2], 1), EMPTY)}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        return find_outside(state, settled=(EMPTY, ahead - 1))

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Buffer arrivals, and evict whenever the threshold is exceeded."""
        both = fold.in_order(held, new)
        settled = fold.state["settled"]
        kept, old = self._evict(both, both.position <= settled, whole=fold.prompt)
        if bool(kept.all()):
            return both, both.part(0, 0)
        decided = both.position.where(old, EMPTY).amax(dim=2, keepdim=True)
        fold.state["settled"] = settled.maximum(decided)
        return split(both, kept, fold)

    def _evict(self, line: Slots, old: Tensor, *, whole: bool) -> tuple[Tensor, Tensor]:
        """Evict from tokens in order. Returns which tokens stay, and which have gone through an
        eviction, whether they stay or not.

        One pass of the loop is one eviction. For a prompt (`whole`), all tokens are segmented in
        the first pass (Remark 2). Otherwise, every arrival that exceeds the threshold causes an
        eviction.
        """
        halved = (self.stride + 1) // 2
        segment, interval = (halved, self.stride) if self.swapped else (self.stride, halved)
        assert line.mass is not None
        kept = line.held
        while bool((over := kept.sum(dim=2, keepdim=True) > self.threshold).any()):
            older, newer = kept & old & over, kept & ~old & over
            if not whole:
                newer &= newer.cumsum(dim=2) <= self.threshold + 1 - older.sum(dim=2, keepdim=True)
            best = _maxima(segment, newer, line.mass) if self.local_max else _every(segment, newer)
            kept = kept & ~older & ~newer | _every(interval, older) | best
            old = old | newer
        return kept, old


def best_window(room: int, stride: int) -> int:
    """Compute the window that Theorem 3.1 combines with a hive, given the slots for both.

    T / w = (s^2 + 1) / (s + 1) for an odd stride and s - 1 for an even one. (The statement is
    right; its proof has the two cases swapped.)
    """
    _check_stride(stride)
    ratio = stride - 1 if stride % 2 == 0 else (stride**2 + 1) / (stride + 1)
    return max(1, round(room / (1 + ratio)))


def _check_stride(stride: int) -> None:
    if stride < 3:
        raise WeirError(
            f"stride must be at least 3, got {stride}: a smaller stride would never evict an old "
            "token"
        )


def _every(step: int, among: Tensor) -> Tensor:
    """Select every `step`-th slot of a mask [batch, kv_heads, slots], from the first on."""
    return among & ((among.cumsum(dim=2) - 1) % step == 0)


def _maxima(size: int, among: Tensor, mass: Tensor) -> Tensor:
    """Select, of every `size` slots of a mask, the one with the largest mass (Algorithm 2).

    Among equal ones, the first is selected. Masses are equal if they differ only by rounding
    (`ALIKE`). The last segment may be shorter.
    """
    segment = (among.cumsum(dim=2) - 1).clamp_min(0) // size
    score = mass.masked_fill(~among, -torch.inf)
    largest = torch.full_like(score, -torch.inf).scatter_reduce(2, segment, score, "amax")
    # Masses are not negative. The largest of a segment without slots is -inf, and stays -inf.
    best = among & (score >= (1 - ALIKE) * largest.gather(2, segment))
    place = torch.arange(mass.shape[2], device=mass.device).where(best, _LAST)
    first = torch.full_like(place, _LAST).scatter_reduce(2, segment, place, "amin")
    return best & (place == first.gather(2, segment))
