"""BalanceKV's merge-and-reduce in a fixed number of slots: balanced halves of all past tokens.

BalanceKV (Kochetkova et al. 2025, "Streaming Attention Approximation via Discrepancy Theory",
arXiv:2502.07861), section 3 and Algorithms 1, 2 and 4: tokens enter level 0. A block of a level is
halved by a walk that keeps its halves balanced for every query (`halving`). The tokens that stay
rise to the next level, where each represents twice as many tokens (`schedule`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.errors import WeirError
from weir.pools.balance.halving import Halves, Halving, check_block
from weir.pools.balance.merge_reduce import Merging
from weir.pools.balance.schedule import LEVELS, NO_BUCKET, Head, at_once, schedule
from weir.pools.base import Fold, SizedPool, find_outside
from weir.pools.parameters import Bounds, Factor
from weir.pools.registry import pool
from weir.slab import EMPTY, Slots

BLOCK = 256
"""The paper's block size for a whole prompt."""
PARTS = 16
"""In a stream, a block gets one in this many slots. With larger blocks, few old tokens remain."""
MOST_BUCKET = 1000
"""Buckets are numbered from minus this to this, which covers more than float32 and bfloat16 can
represent.
"""
Sums = Literal["shared", "flat", "separate"]


@pool("balance")
@dataclass(frozen=True)
class Balance(SizedPool):
    """Keep a balanced sample of all tokens that arrive, by halving blocks of them again and again,
    weighted for the tokens they represent.

    While there is room, nothing is removed. Then blocks are halved, the lightest tokens first and
    of those the oldest, so the newest tokens stay exact longest. A prompt that is folded whole is
    halved in rounds, as in the paper's experiments, unless `eager` is true or the sets are
    separate.

    Attributes:
        n: number of slots.
        block: the most tokens that are halved at once, an even number, at most half of the slots.
            With `none`, it is the paper's 256 where a prompt is halved in rounds, and otherwise a
            16th of the slots (half of the slots if eager), but at most 256.
        halves: which tokens of a block stay. pairs: one of each two neighbors, which represents
            both; exactly half stay, and both sums of attention, its numerator and its denominator,
            are unbiased. authors: the rule of the authors' code, exactly half. paper: the smaller
            side of the walk, at most half.
        gamma: how strongly the walk, which gives each token the sign + or -, counteracts its sum s
            so far: + has the probability 1/2 - gamma s. 4 in the authors' code, which is nearly
            greedy; `none` for the paper's constant, nearly a fair coin.
        temperature: temperature of the keys in the walk; 1 in the paper, 1 and 0.1 in the authors'
            code.
        constant: how much the denominator counts in the walk compared with the values; 0.025 in the
            authors' code.
        sets: shared: a token has one weight in both sums. flat: each halving doubles the weights of
            all remaining tokens in the denominator, as in the authors' code; only for
            halves=authors. separate: the paper's Algorithm 1, with one set for the denominator and
            others for the numerator, by the length of the value; each token then takes two slots,
            and `constant` is not used.
        precision: the paper's epsilon, for separate sets. The numerator has a set for each bucket
            of values: those with lengths from 2^(i-1) to 2^i. When there is no room, the buckets
            that end at or below precision / sqrt(tokens so far) times the longest value's length
            are erased. If there are still more sets than slots, those of the shortest values are
            erased, too.
        eager: halve a level as soon as it has a block, as Algorithm 4 does. The policy is then not
            exact below its budget.
    """

    ends_pipe = True  # the kept tokens represent all that arrived

    n: Annotated[int, Bounds(4)]
    block: int | None = None
    halves: Halves = "pairs"
    gamma: Factor | None = 4.0
    temperature: Factor = 0.1
    constant: Factor = 0.025
    sets: Sums = "shared"
    precision: Factor = 0.1
    eager: bool = False

    def __post_init__(self) -> None:
        if self.block is not None:
            check_block(self.block, self.n // 2)
        _ = self.halving

    @property
    def halving(self) -> Halving:
        """The rule by which blocks are halved."""
        constant = 1.0 if self.sets == "separate" else self.constant
        flat = self.sets == "flat"
        return Halving(self.halves, self.gamma, self.temperature, constant, flat)

    @property
    def largest_block(self) -> int:
        """The most tokens that are halved at once in a stream."""
        # Eager levels keep less than a block each, so small blocks would leave slots unused. The
        # thresholds of `schedule` reduce large blocks to a size that fits.
        parts = 2 if self.eager else PARTS
        return self.block or min(BLOCK, max(2, self.n // parts // 2 * 2))

    @property
    def two_weights(self) -> bool:
        """Whether a and b may differ."""
        return self.sets != "shared"

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the state of the slots.

        It is `level`, the level of each slot [batch, kv_heads, n], int64; -1 for an unused slot. If
        fewer than half of a block's tokens stayed, some used slots are empty until the next fold.
        Separate sets also have the `bucket` of each slot, int64, and for each head [batch,
        kv_heads] `came`, its tokens so far, int64, and `longest`, the length of their longest
        value, float64.
        """
        shape = like.position.shape[:2]
        state = {"level": like.position.new_full((*shape, self.n), EMPTY)}
        if self.sets == "separate":
            state["bucket"] = torch.full_like(state["level"], NO_BUCKET)
            state["came"] = like.position.new_zeros(shape)
            state["longest"] = torch.zeros_like(state["came"], dtype=torch.float64)
        return state

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        # With few slots, or in sets that have few each, single tokens rise to the next level. There
        # can then be more levels than the logarithm of the number of tokens.
        most = LEVELS if self.sets == "separate" else max(ahead.bit_length() + 1, math.isqrt(ahead))
        if not bool((state["level"][:, :, held:] == EMPTY).all()):
            return "level is set for a slot that is not in use"
        number = state.get("bucket", torch.zeros(0))
        return find_outside(
            {**state, "bucket": number.where(number != NO_BUCKET, 0)},
            level=(EMPTY, min(LEVELS - 1, most)),
            bucket=(-MOST_BUCKET, MOST_BUCKET),
            came=(0, ahead),
            longest=(0, 2.0**MOST_BUCKET),
        )

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Let arrivals in one after the other, and halve if there is no room."""
        if len(new) == 0:
            return held, new
        if not new.finite:
            raise WeirError(
                "balance got a key or value that is not finite, so its sums are undefined. Check "
                "the model."
            )
        if self.sets == "separate":
            return self._fold_separate(held, new, fold), new.part(0, 0)
        level = self._levels(held, fold)
        came = new.held.sum(dim=2).flatten().tolist()
        if fold.prompt and not self.eager:
            blocks = [at_once(self.n, self.block or BLOCK, arrivals) for arrivals in came]
        else:
            blocks = [
                schedule(self.n, self.largest_block, self.eager, sizes, arrivals)
                for sizes, arrivals in zip(_sizes(level), came, strict=True)
            ]
        kept, level = held.join(new), _with(level, new)
        if len(kept) > self.n or any(map(any, blocks)):
            merging = Merging(kept, level, self.halving, fold.draws, fold.form.scale)
            kept, level, _ = merging.reduce(blocks)
        fold.state["level"] = self._state(level, EMPTY)
        return kept, new.part(0, 0)

    def _fold_separate(self, held: Slots, new: Slots, fold: Fold) -> Slots:
        """Fold separate sets for denominator and numerator, by the paper's Algorithm 1."""
        lengths = new.values.double().norm(dim=-1).masked_fill(~new.held, 0.0)
        longest = lengths.cummax(dim=2).values.maximum(fold.state["longest"][..., None])
        came = fold.state["came"][..., None] + new.held.cumsum(dim=2)
        short = self.precision / came.clamp_min(1).sqrt() * longest
        new = doubled(new)
        level, number = self._levels(held, fold), fold.state["bucket"][:, :, : len(held)]
        level = _with(level, new)
        mine = bucket(new.values).where(~new.a.isneginf(), NO_BUCKET)
        number = torch.cat([number, mine], dim=2)
        columns = (t.flatten(0, 1).tolist() for t in (number, level, short))
        heads = [
            Head.admit(self.n, self.largest_block, self.eager, *of_head)
            for of_head in zip(*columns, strict=True)
        ]
        groups = max(len(head.groups) for head in heads)
        blocks = [group.halved for head in heads for group in head.padded(groups)]
        group = level.new_tensor([head.tokens for head in heads]).view_as(level)
        how = self.halving, fold.draws, fold.form.scale
        merging = Merging(held.join(new), level.where(group >= 0, EMPTY), *how, group, groups)
        kept, level, group = merging.reduce(blocks)
        numbers = level.new_tensor([head.buckets(groups) for head in heads])
        number = numbers.view(*level.shape[:2], groups).gather(2, group)
        fold.state["level"] = self._state(level, EMPTY)
        fold.state["bucket"] = self._state(number.where(level >= 0, NO_BUCKET), NO_BUCKET)
        fold.state["came"], fold.state["longest"] = came[..., -1], longest[..., -1]
        return kept

    def _levels(self, held: Slots, fold: Fold) -> Tensor:
        """Return the level of each slot that counts towards a block [batch, kv_heads, slots].

        If fewer than half of a block's tokens stayed, places of the level above are empty.
        Algorithm 4 (`eager`) counts these places. Otherwise they are freed when the next tokens
        arrive.
        """
        level = fold.state["level"][:, :, : len(held)]
        return level if self.eager else level.where(held.held, EMPTY)

    def _state(self, of_slots: Tensor, nothing: int) -> Tensor:
        return F.pad(of_slots, (0, self.n - of_slots.shape[2]), value=nothing)


def _with(level: Tensor, new: Slots) -> Tensor:
    """Join the levels of the held tokens and level 0 for each arrival."""
    return torch.cat([level, torch.where(new.held, 0, EMPTY)], dim=2)


def _sizes(level: Tensor) -> list[tuple[int, ...]]:
    """Count the places of each level, for each head of each row."""
    flat = level.flatten(0, 1) + 1
    counts = flat.new_zeros(flat.shape[0], LEVELS + 1)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    return [tuple(row[1:]) for row in counts.tolist()]


def doubled(new: Slots) -> Slots:
    """Duplicate every token: one copy for only the denominator, and one for only the numerator.

    A copy is empty if it would add nothing.
    """
    nothing = torch.full_like(new.a, -torch.inf)
    below = replace(new, a=nothing, position=new.position.masked_fill(new.b.isneginf(), EMPTY))
    silent = new.a.isneginf() | (bucket(new.values) == NO_BUCKET)
    above = replace(
        new,
        a=new.a.masked_fill(silent, -torch.inf),
        b=nothing,
        position=new.position.masked_fill(silent, EMPTY),
    )
    order = torch.arange(2 * len(new), device=nothing.device).view(2, -1).T.flatten()
    return below.join(above).take_sorted(order.expand(*nothing.shape[:2], -1))


def bucket(values: Tensor) -> Tensor:
    """Return the i with 2^(i-1) < ‖v‖ <= 2^i for values [..., value_dim], int64; `NO_BUCKET` for a
    length of 0.
    """
    length = values.double().norm(dim=-1)
    mantissa, exponent = torch.frexp(length)
    return torch.where(length > 0, exponent - (mantissa == 0.5).long(), NO_BUCKET).long()
