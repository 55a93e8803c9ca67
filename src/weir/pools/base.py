"""What a pool is: a rule for who holds its slots.

To add one: a frozen dataclass of its parameters, with `@pool("name")` (`weir.pools.registry`), a
method that says how many slots it needs and one that folds. Nothing else in weir has to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.errors import WeirError
from weir.pools.counter_rng import CounterRNG
from weir.pools.observed_attention import ObservedAttention
from weir.pools.parameters import fits
from weir.slab import Alibi, AttentionParams, Slots

MOST_WEIGHT = 1e4
"""No log-weight is larger: e^700 is more than float64 can say."""


@dataclass(frozen=True)
class Fold:
    """What a pool may know when it folds.

    Attributes:
        draws: this pool's random numbers, in this layer.
        seen: tokens of the stream so far [batch], int64.
        form: how the layer attends: the factor of the logits, usually 1/sqrt(key_dim), and more.
        queries: the last queries, as the attention sees them at their own place in the stream
            [batch, kv_heads, group, n, key_dim]; None unless a pool of the pipe asks for them.
        read: what these queries read, and how: keys as attention sees them where they are read,
            shares of attention, keys without rotation, the layer's output projection. None in a
            fold of slots that lie in no layer.
        prompt: true when a whole prompt is folded at once (`prefill="full"`).
        origin: the place in the stream of the first token.
        alibi: the layer's linear biases; None for none.
        last: true for the last pool of a pipe: nobody looks at what flows on from it.
        unbroken: true while nothing was lost upstream: arrivals come in order, each the successor
            of the last.
        beginning: tokens of the stream's beginning, the same in all rows that fold together; None
            if nobody said how many (`Marks`).
        turn: where the running turn begins [batch], int64; None if nobody said.
        header: tokens that begin it, the same in all rows.
        state: what the pool remembers beside its slots (`Pool.state`); it puts new tensors of the
            same shape in place of the old ones, and writes into none.
    """

    draws: CounterRNG
    seen: Tensor
    form: AttentionParams
    queries: Tensor | None = None
    read: ObservedAttention | None = None
    prompt: bool = False
    origin: int = 0
    alibi: Alibi | None = None
    last: bool = False
    unbroken: bool = True
    beginning: int | None = None
    turn: Tensor | None = None
    header: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def next(self) -> Tensor:
        """The place in the stream of the next token [batch], int64."""
        return self.seen + self.origin

    def in_order(self, held: Slots, new: Slots) -> Slots:
        """What a pool holds and what arrives, from the oldest token on; empty slots first.

        Unbroken arrivals are all newer than what is held, so they need no sorting; what the pool
        holds has to lie in order itself.
        """
        both = held.join(new)
        return both if self.unbroken else both.by_position()


class Pool(ABC):
    """A rule for who holds some slots of each KV head.

    What a pool says of itself are properties, each with what holds for most pools. Where another
    answer is always the same, the class says it as an attribute, `needs_mass = True`; where it
    depends on a parameter, as a property or as the parameter itself.

    Attributes:
        name: its name in a policy, which the decorator `pool` sets.
    """

    name: ClassVar[str]

    @property
    def needs_mass(self) -> bool:
        """Whether it reads `Slots.mass`, the attention each token received."""
        return False

    @property
    def needs_queries(self) -> int:
        """How many of the last queries it reads when it folds (`Fold.queries`)."""
        return 0

    @property
    def needs_shares(self) -> bool:
        """Whether it reads the attention of each query (`ObservedAttention.attention`).

        Sums over queries (`ObservedAttention.received`) take less memory.
        """
        return self.needs_queries > 0

    @property
    def needs_marks(self) -> bool:
        """Whether it reads what rows are told of their streams (`Fold.beginning`, `turn`)."""
        return False

    @property
    def two_weights(self) -> bool:
        """Whether it sets a and b apart."""
        return False

    @property
    def weighs(self) -> bool:
        """Whether it gives what it keeps other weights than these came with, as it may at any fold.

        Pools that end a pipe may do so without saying it.
        """
        return self.two_weights

    @property
    def log_n(self) -> bool:
        """Whether logits are to be scaled by log_512 of the number of tokens a query sees."""
        return False

    @property
    def in_order(self) -> bool:
        """Whether it keeps the first that arrive, or the newest, and all others flow on, in order
        and without a gap.
        """
        return False

    @property
    def heads_agree(self) -> bool:
        """Whether all KV heads of a layer keep the same tokens where the same arrive."""
        return self.in_order

    @property
    def keeps_run(self) -> bool:
        """Whether its slots are the newest tokens without a gap, whenever its arrivals are."""
        return False

    @property
    def is_stochastic(self) -> bool:
        """Whether random numbers may decide what it keeps; where not, seeds change nothing."""
        return True

    @property
    def ends_pipe(self) -> bool:
        """Whether nothing flows on, because what it keeps is all that came, or stands for it."""
        return False

    @property
    def synthetic(self) -> bool:
        """Whether a slot may hold what no token said, and is said to hold one that it stands for.

        Such slots change at every fold, so they are never quantized.
        """
        return False

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse a place in a pipe that makes no sense, given the pools in front of it.

        Raises:
            WeirError: with the reason.
        """

    def state(self, like: Slots) -> dict[str, Tensor]:
        """What the pool remembers beside its slots, as it is before the first token.

        Most pools need nothing. Tensors [batch, kv_heads, ...], on the device of `like`, which has
        the batch, heads and sizes of the layer and no slots. They keep their shapes for ever; only
        a pool without a limit may lengthen the third dimension, and in rows that do not fold then
        what is added is zero. A cache counts, saves, restores and reorders them with its slots.
        """
        return {}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """Why tensors that come from elsewhere cannot be what the pool remembers; None if they can.

        A fold must be able to go on from whatever passes: here are refused numbers that would lead
        it to a slot or a level that is not there, or that are no numbers.

        Args:
            state: tensors of the names, shapes and dtypes of `state`.
            held: how many slots it holds.
            ahead: the next place in the stream, which no token has reached.
        """
        return None

    def report(self, state: dict[str, Tensor], row: int) -> dict[str, Any]:
        """What it has to say of a row beside its slots, as JSON can hold it; see `Stream.report`.

        Args:
            state: what it remembers, of all rows.
            row: which row is asked about.
        """
        return {}

    @abstractmethod
    def slots(self) -> int | None:
        """How many slots per KV head it may hold; None if there is no limit."""

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """Of its slots, those that every layer of a pyramid has, given the pools in front."""
        return 0

    def resized(self, slots: int) -> Pool:
        """The same pool with another number of slots, for a pyramid.

        Raises:
            WeirError: its first parameter does not say how many it has, and it knows no other way.
        """
        size = fields(cast(Any, self))[0].name
        if getattr(self, size) != self.slots():
            raise WeirError(f"{self.name} cannot be given {slots} slots in place of {self.slots()}")
        resized: Pool = replace(cast(Any, self), **{size: slots})
        return resized

    @abstractmethod
    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Decide who stays: (kept, overflow), from what is held and what arrives.

        `kept` has at most `slots()` slots. Heads may keep different tokens; where they keep
        different numbers of them, the missing slots are empty. Returning `held` itself says that
        nothing changed.
        """


def split(slots: Slots, stays: Tensor, fold: Fold | None = None) -> tuple[Slots, Slots]:
    """(those that stay, those that flow on), as a fold returns them, each in the order they lie in.

    Args:
        slots: what is held and what arrives.
        stays: which of them stay [batch, kv_heads, slots], bool; empty slots are in neither part.
        fold: in which they do; behind the last pool of a pipe nothing flows on.
    """
    kept = slots.only(stays)
    return kept, slots.part(0, 0) if fold is not None and fold.last else slots.only(~stays)


def gather_kept(x: Tensor, stays: Tensor, room: int) -> Tensor:
    """What a pool knows of slots, of those that stay and in the order in which `split` leaves them.

    Args:
        x: numbers of slots [batch, kv_heads, slots, ...].
        stays: which of them stay [batch, kv_heads, slots], bool; `room` of a head at most.
        room: slots of the result; zeros where fewer stay.
    """
    order = (~stays).to(torch.uint8).argsort(dim=2, stable=True)[:, :, :room]
    there = stays.gather(2, order)
    more = (1,) * (x.ndim - 3)
    order, there = (t.view(*t.shape, *more) for t in (order, there))
    taken = x.gather(2, order.expand(*order.shape[:3], *x.shape[3:])).masked_fill(~there, 0.0)
    return F.pad(taken, (*(0, 0) * (x.ndim - 3), 0, room - order.shape[2]))


def is_within(t: Tensor, low: float, high: float) -> bool:
    """Whether all numbers are from `low` to `high`; what is no number is not."""
    return bool(((t >= low) & (t <= high)).all())


@dataclass(frozen=True)
class Marks:
    """Places of one row's stream that matter beyond what stands there.

    Attributes:
        beginning: tokens of the stream's beginning, its system turn, say; None if nobody said how
            many.
        turn: the place in the stream where the running turn begins.
        header: tokens that begin it: what a template puts in front of the answer.

    Raises:
        WeirError: one of them is no number of tokens.
    """

    beginning: int | None = None
    turn: int = 0
    header: int = 0

    def __post_init__(self) -> None:
        for name in ("beginning", "turn", "header"):
            value = getattr(self, name)
            if value is None and name == "beginning":
                continue
            if not fits(value, int) or not 0 <= value <= 2**53:
                raise WeirError(f"{name} is a number of tokens from 0 on, not {value!r}")


@dataclass(frozen=True)
class PoolWrapper(Pool):
    """A pool that folds by another one's judgment, and needs, remembers and reports as that does.

    Attributes:
        pool: the other, with as many slots as it says.
    """

    pool: Pool

    @property
    def needs_mass(self) -> bool:
        """As the pool inside."""
        return self.pool.needs_mass

    @property
    def needs_queries(self) -> int:
        """As the pool inside."""
        return self.pool.needs_queries

    @property
    def needs_shares(self) -> bool:
        """As the pool inside."""
        return self.pool.needs_shares

    @property
    def needs_marks(self) -> bool:
        """As the pool inside."""
        return self.pool.needs_marks

    @property
    def log_n(self) -> bool:
        """As the pool inside."""
        return self.pool.log_n

    @property
    def heads_agree(self) -> bool:
        """As the pool inside."""
        return self.pool.heads_agree

    @property
    def is_stochastic(self) -> bool:
        """As the pool inside."""
        return self.pool.is_stochastic

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse what the pool inside refuses."""
        self.pool.check(before)

    def state(self, like: Slots) -> dict[str, Tensor]:
        """What the pool inside remembers."""
        return self.pool.state(like)

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """Why tensors cannot be what it remembers; see `Pool.wrong_state`."""
        return self.pool.wrong_state(state, held, ahead)

    def report(self, state: dict[str, Tensor], row: int) -> dict[str, Any]:
        """As the pool inside."""
        return self.pool.report(state, row)

    def slots(self) -> int:
        """As many as the pool inside, which has a limit."""
        return self.pool.slots() or 0

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """As many as of the pool inside."""
        return self.pool.fixed(before)

    def resized(self, slots: int) -> Pool:
        """The same around a pool of another size."""
        return replace(self, pool=self.pool.resized(slots))
