"""The interface of pools. A pool is a rule that decides which tokens keep a slot.

Several pools in a row are a pipe. After every few tokens, the pipe folds: the new tokens enter the
first pool, and each pool chooses the tokens that it keeps and passes the others on to the next.

To add a pool, write a frozen dataclass of its parameters under `@pool("name")`
(`weir.pools.registry`), with the methods `slots` and `fold`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.errors import WeirError, quote
from weir.pools.counter_rng import CounterRNG
from weir.pools.observed_attention import ObservedAttention
from weir.pools.parameters import fits
from weir.slab import Alibi, AttentionParams, Slots

MOST_WEIGHT = 1e4
"""The largest log-weight that is accepted. It is generous: e^710 already overflows float64."""
MOST = 1e300
FINITE, FROM_0, LOG_WEIGHT = (-MOST, MOST), (0.0, MOST), (-torch.inf, MOST_WEIGHT)
"""Bounds for tensors of a state, for `find_outside`."""


MOST_RANGES = 1024
"""The most ranges of tokens that a row may be told to keep."""


@dataclass(frozen=True)
class Marks:
    """Facts about a row's stream that its tokens do not show: where its system turn ends, where the
    header of its current turn is, and which tokens must be kept.

    Attributes:
        beginning: number of tokens at the start of the stream that belong together, such as its
            system turn; None if not known.
        turn: the place in the stream where the header of the current turn begins.
        header: number of tokens of this header, which the chat template puts in front of the
            answer.
        kept: ranges of places in the stream whose tokens must be kept, in order and without
            overlap. Each range is its first place and the place after its last.

    Raises:
        WeirError: `beginning`, `turn` or `header` is not a number of tokens, or `kept` is not such
            ranges.
    """

    beginning: int | None = None
    turn: int = 0
    header: int = 0
    kept: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("beginning", "turn", "header"):
            value = getattr(self, name)
            known = value is not None or name != "beginning"
            if known and (not fits(value, int) or not 0 <= value <= 2**53):
                raise WeirError(f"{name} must be a number of tokens from 0 to 2^53, got {value!r}")
        if (why := wrong_ranges(self.kept)) is not None:
            raise WeirError(f"kept {why}")
        object.__setattr__(self, "kept", tuple((start, stop) for start, stop in self.kept))


def wrong_ranges(kept: Any) -> str | None:
    """Return what is wrong with ranges of tokens to keep (`Marks.kept`); None if they are valid."""
    if not isinstance(kept, tuple | list) or len(kept) > MOST_RANGES:
        return f"must be at most {MOST_RANGES} ranges, as in ((100, 150), (200, 230))"
    last = 0
    for one in kept:
        whole = isinstance(one, tuple | list) and len(one) == 2 and all(fits(n, int) for n in one)
        if not whole or not last <= one[0] < one[1] <= 2**53:
            return (
                "must be ranges of places in the stream, from 0 to 2^53, in order and without "
                f"overlap, as in ((100, 150), (200, 230)), got {quote(one)}"
            )
        last = one[1]
    return None


@dataclass(frozen=True)
class Fold:
    """All facts that a pool can use when it folds.

    Attributes:
        draws: this pool's random numbers, in this layer.
        seen: number of tokens of the stream so far [batch], int64.
        form: the parameters of the layer's attention: the factor of the logits, usually
            1/sqrt(key_dim), their cap, and the model's sink logits.
        queries: the last queries, each rotated to its place in the stream [batch, kv_heads, group,
            n, key_dim]; None unless a pool of the pipe asks for them.
        read: the attention of these queries, with keys rotated to the positions at which the layer
            reads them. None if the slots do not belong to a layer.
        prompt: true when a whole prompt is folded at once (`prefill="full"`).
        origin: the place in the stream of the first token.
        alibi: the layer's linear biases; None if it has none.
        last: true for the last pool of a pipe, whose overflow is lost.
        unbroken: true if all pools before this one pass on tokens in order, so that the arrivals
            are newer than everything that came before, and have no gaps.
        beginning: number of tokens in the stream's beginning, the same in all rows that fold
            together; None if not known (`Marks`).
        turn: the place where the header of the current turn begins [batch], int64; None if not
            known.
        header: number of tokens in the header of the turn, the same in all rows that fold together.
        kept: places of tokens to keep, the first and the one after the last of each range
            [batch, ranges, 2], int64; None if there are none.
        state: the pool's state in addition to its slots (`Pool.state`). A fold replaces its tensors
            by new ones, which are longer only if the pool has no limit, and never writes into them.
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
    kept: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def next(self) -> Tensor:
        """The place in the stream of the next token [batch], int64."""
        return self.seen + self.origin

    @property
    def observed(self) -> ObservedAttention:
        """`read`, for pools that cannot fold without it."""
        assert self.read is not None
        return self.read

    def in_order(self, held: Slots, new: Slots) -> Slots:
        """Join the slots of a pool, which are in order, and the arrivals, with the oldest token
        first.

        Arrivals that are `unbroken` are newer than all held tokens, so only other arrivals have to
        be sorted.
        """
        both = held.join(new)
        return both if self.unbroken else both.by_position()


class Pool(ABC):
    """A rule that decides which tokens keep a slot, for each KV head.

    A subclass defines `slots` and `fold`. Its properties have defaults, which a subclass overrides
    with a class attribute, such as `needs_mass = True`, or with a property if the value depends on
    a parameter. `SizedPool`, `Ranked` and `Tallied` are simpler bases for most pools.

    Attributes:
        name: its name in a policy, set by the decorator `pool`.
    """

    name: ClassVar[str]

    @property
    def needs_mass(self) -> bool:
        """Whether it reads `Slots.mass`, the attention that each token received."""
        return False

    @property
    def needs_queries(self) -> int:
        """How many of the last queries it reads in a fold (`Fold.queries`)."""
        return 0

    @property
    def needs_shares(self) -> bool:
        """Whether it reads the attention of each query separately (`ObservedAttention.attention`).
        Sums over the queries (`ObservedAttention.received`) take less memory.
        """
        return self.needs_queries > 0

    @property
    def needs_gates(self) -> bool:
        """Whether it reads the layer's gate, a trained prediction of how much each token will be
        needed (`ObservedAttention.gate`).
        """
        return False

    @property
    def needs_marks(self) -> bool:
        """Whether it reads the marks of rows (`Fold.beginning`, `turn`, `header`, `kept`)."""
        return False

    @property
    def shares_slots(self) -> bool:
        """Whether it uses slots that the first pool of the pipe leaves free, so that its own slots
        are not counted.
        """
        return False

    @property
    def two_weights(self) -> bool:
        """Whether it sets the log-weights a and b separately."""
        return False

    @property
    def weighs(self) -> bool:
        """Whether it may change the weights of kept tokens. Pools with `ends_pipe` may do so in any
        case.
        """
        return self.two_weights

    @property
    def log_n(self) -> bool:
        """Whether the layer's logits are scaled by log_512 of the number of tokens a query sees."""
        return False

    @property
    def in_order(self) -> bool:
        """Whether it keeps the first or the newest arrivals, and passes on all others in order."""
        return False

    @property
    def heads_agree(self) -> bool:
        """Whether all KV heads of a layer keep the same tokens if they receive the same tokens."""
        return self.in_order

    @property
    def keeps_run(self) -> bool:
        """Whether its slots are the newest tokens without a gap if its arrivals have none."""
        return False

    @property
    def is_stochastic(self) -> bool:
        """Whether random numbers may affect what it keeps. If not, seeds change nothing."""
        return True

    @property
    def drops(self) -> bool:
        """Whether one of its tokens can be dropped at a caller's request (`StreamingCache.drop`).

        This needs slots with the unchanged key and value of one token each, and a fold that works
        with any of its slots empty.
        """
        return False

    @property
    def ends_pipe(self) -> bool:
        """Whether no token leaves it, because its slots hold or represent all tokens that came."""
        return False

    @property
    def synthetic(self) -> bool:
        """Whether a slot may hold a key and value that no token had. Such a slot is never
        quantized.
        """
        return False

    def check(self, before: tuple[Pool, ...]) -> None:
        """Raise a `WeirError` if the pool makes no sense after these pools in a pipe."""

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the state in addition to the slots, as it is before the first token; most pools have
        none.

        The tensors are [batch, kv_heads, ...], on the device of `like`, which has the batch, heads
        and sizes of the layer and no slots. Shapes never change, except that a pool without a limit
        may lengthen the third dimension; zeros are then added in rows that do not fold. A cache
        counts, saves, restores and reorders the state with the slots.
        """
        return {}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """Return why a state, such as one from a session file, is not valid for this pool. None if
        a fold can use it.

        Numbers of slots or levels that do not exist, infinities and NaN are invalid.

        Args:
            state: tensors with the names, shapes and dtypes that `state` makes.
            held: number of slots that the pool holds.
            ahead: the next place in the stream, which no token has reached.
        """
        return None

    def report(self, state: dict[str, Tensor], row: int) -> dict[str, Any]:
        """Return facts about a row for `Stream.report`, as JSON values."""
        return {}

    @abstractmethod
    def slots(self) -> int | None:
        """Return the most slots per KV head that it may hold. None if there is no limit."""

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """Return how many of its slots are the same in every layer of a pyramid, a policy that
        gives layers different numbers of slots. `before` are the pools before it in the pipe.
        """
        return 0

    def resized(self, slots: int) -> Pool:
        """Return the same pool with another number of slots, for a pyramid.

        Raises:
            WeirError: its first parameter is not its number of slots.
        """
        size = fields(cast(Any, self))[0].name
        if getattr(self, size) != self.slots():
            raise WeirError(
                f"{self.name} cannot be resized to {slots} slots, because its first parameter is "
                f"not its number of slots, {self.slots()}. Define resized() in the pool."
            )
        resized: Pool = replace(cast(Any, self), **{size: slots})
        return resized

    @abstractmethod
    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Decide which tokens stay. Returns (kept, overflow), with at most `slots()` kept.

        Heads may keep different tokens. If they keep different numbers of tokens, the missing slots
        are empty. Returning `held` itself means that nothing changed.

        Args:
            held: the slots of the pool.
            new: the arrivals.
            fold: all other facts that it can use.
        """


class SizedPool(Pool):
    """A pool whose first parameter is its number of slots.

    Raises:
        WeirError: the number is less than 1.
    """

    def __post_init__(self) -> None:
        if self.slots() < 1:
            raise WeirError(f"{self.name} must keep at least 1 token, got {self.slots()}")

    def slots(self) -> int:
        """Return the number of slots, which is the first parameter."""
        return int(getattr(self, fields(cast(Any, self))[0].name))


def _of_inner(name: str) -> Any:
    """Make a property of a `PoolWrapper` that returns an attribute or method of the inner pool."""
    return property(lambda self: getattr(self.pool, name))


@dataclass(frozen=True)
class PoolWrapper(Pool):
    """A pool around an inner pool. The needs, the state, the slots and the report are those of the
    inner pool. A subclass defines `fold`.

    Attributes:
        pool: the inner pool.
    """

    pool: Pool

    drops = _of_inner("drops")
    needs_mass = _of_inner("needs_mass")
    needs_queries = _of_inner("needs_queries")
    needs_shares = _of_inner("needs_shares")
    needs_gates = _of_inner("needs_gates")
    needs_marks = _of_inner("needs_marks")
    shares_slots = _of_inner("shares_slots")
    log_n = _of_inner("log_n")
    heads_agree = _of_inner("heads_agree")
    is_stochastic = _of_inner("is_stochastic")
    check = _of_inner("check")
    state = _of_inner("state")
    wrong_state = _of_inner("wrong_state")
    report = _of_inner("report")
    slots = _of_inner("slots")
    fixed = _of_inner("fixed")

    def resized(self, slots: int) -> Pool:
        """Return the same wrapper, with its inner pool resized."""
        return replace(self, pool=self.pool.resized(slots))


def split(slots: Slots, stays: Tensor, fold: Fold | None = None) -> tuple[Slots, Slots]:
    """Split slots into those that stay and those that overflow, each in their previous order.

    `stays` is [batch, kv_heads, slots], bool; empty slots are in neither part. If `fold` says that
    this is the last pool of the pipe, the second part is empty, because nothing would read it.
    """
    kept = slots.only(stays)
    return kept, slots.part(0, 0) if fold is not None and fold.last else slots.only(~stays)


def gather_kept(x: Tensor, stays: Tensor, room: int) -> Tensor:
    """Gather the numbers [batch, kv_heads, slots, ...] of the slots that stay.

    They are in the order of `split`, padded with zeros to `room` slots.
    """
    order = (~stays).to(torch.uint8).argsort(dim=2, stable=True)[:, :, :room]
    there = stays.gather(2, order)
    more = (1,) * (x.ndim - 3)
    order, there = (t.view(*t.shape, *more) for t in (order, there))
    kept = x.gather(2, order.expand(*order.shape[:3], *x.shape[3:])).masked_fill(~there, 0.0)
    return F.pad(kept, (*(0, 0) * (x.ndim - 3), 0, room - order.shape[2]))


def find_outside(state: Mapping[str, Tensor], **bounds: tuple[float, float]) -> str | None:
    """Return which tensor of a state is out of its bounds, for `Pool.wrong_state`.

    NaN is out of bounds, and so is infinity, unless it is the lower bound. Missing names are
    ignored.
    """
    for name, (low, high) in bounds.items():
        t = state.get(name, torch.empty(0))
        finite = t.isfinite() | (t.isneginf() & (low == -torch.inf))
        if not bool(((t >= low) & (t <= high) & finite).all()):
            wanted = f"from {low:g} to {high:g}" if high < MOST else "finite"
            return f"{name} is not {wanted}{' and at least 0' * (low == 0 and high == MOST)}"
    return None
