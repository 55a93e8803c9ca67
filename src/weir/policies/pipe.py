"""What a policy is: pools one after the other, or something that only a stream can do.

Tokens enter the first pool of a pipe, what overflows a pool flows into the next, what overflows the
last is gone. How policies are written is the business of `grammar`; which have a name, of `policy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self, cast

from torch import Tensor

from weir.errors import WeirError, format_value
from weir.policies.checks import check_fold, check_formats, check_place, check_state
from weir.policies.registry import NAMED, PolicyCall
from weir.pools import Fold, Pool
from weir.slab import FORMATS, Format, Slots

CHUNK = 64
"""Tokens that are taken in before a policy folds them, where nobody says how many."""


@dataclass(frozen=True)
class Origin:
    """Where a policy was measured.

    Attributes:
        file: the policy file that says so.
        model: the fingerprint of the model (`models.fingerprint`).
        told: what an error about it ends with: of a file that nobody named, how it came to be
            taken.
        chunk: tokens between two folds when it was measured; None where the file does not say.
    """

    file: str
    model: Mapping[str, Any]
    told: str = ""
    chunk: int | None = None


class Policy(ABC):
    """How a cache is held to its size. A `Pipe`, or something that only a `Stream` can do.

    Attributes:
        text: the policy as it was written, or as it can be.
        called: how it was called, if it was made by its name; None for one made of pools.
    """

    text: str
    called: PolicyCall | None = None

    @abstractmethod
    def for_layer(self, layer: int, layers: int) -> Pipe:
        """The pipe of one layer of a model that has `layers` of them."""

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """What is known of its pipes without a model: a layer's on average, or that of each."""
        return (self.for_layer(0, 1),)

    @property
    def origin(self) -> Origin | None:
        """Where it was measured; most policies were measured nowhere."""
        return None

    @property
    def stands_for(self) -> str:
        """What it is made of, in pools: of `reservoir(64)`, `sink(4) | recent(44) | reservoir(16)`.

        Read as a policy, it is the same one.
        """
        return self.text

    @property
    def brief(self) -> str:
        """The text, or where that is a long list of layers, how many there are and their slots."""
        return self.text

    def as_written(self, text: str, called: PolicyCall) -> Self:
        """The same policy, that says it was written and called so."""
        same = copy(self)
        object.__setattr__(same, "text", text)
        object.__setattr__(same, "called", called)
        return same

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        """Name and pools: `reservoir(budget=64) = sink(4) | recent(44) | reservoir(16)`."""
        name, pools = str(self.called or self.stands_for), self.stands_for
        return pools if name == pools else f"{name} = {pools}"


def resolve_chunk(policy: Policy, chunk: int | None) -> int:
    """How many tokens are taken in between two folds: what is asked for, or was measured, or 64.

    Args:
        policy: what folds.
        chunk: what is asked for; None for nothing.
    """
    if chunk is not None:
        return chunk
    measured = None if policy.origin is None else policy.origin.chunk
    return CHUNK if measured is None else measured


@dataclass(frozen=True, repr=False)
class Pipe(Policy):
    """Pools in the order tokens flow through them.

    Attributes:
        pools: the pools, the one where tokens enter first.
        text: the policy as it was written.
        formats: how the slots of each pool are quantized, by the names of `slab.FORMATS`; "" for
            those that are as the model computes. Without any, all are.
    """

    pools: tuple[Pool, ...]
    text: str = field(default="", compare=False)
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.pools or not all(isinstance(pool, Pool) for pool in self.pools):
            raise WeirError(
                "a pipe is made of one pool or more, as in Pipe((Sink(4), Recent(252)))"
            )
        for place, pool in enumerate(self.pools):
            check_place(pool, self.pools[:place])
        object.__setattr__(self, "formats", self.formats or ("",) * len(self.pools))
        check_formats(self.pools, self.formats, self.run)
        if not self.text:
            object.__setattr__(self, "text", self.stands_for)

    @property
    def stands_for(self) -> str:
        """Its pools, the way they are written."""
        alone = len(self.pools) == 1
        return " | ".join(
            _written(pool, alone) + (f":{form}" if form else "")
            for pool, form in zip(self.pools, self.formats, strict=True)
        )

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """The same pipe for every layer."""
        return self

    @cached_property
    def slots(self) -> int | None:
        """Slots per KV head; None where a pool has no limit."""
        each = [pool.slots() for pool in self.pools]
        return None if None in each else sum(n for n in each if n is not None)

    @cached_property
    def unbroken(self) -> tuple[bool, ...]:
        """For each pool, whether its arrivals are all that came, in order."""
        return tuple(
            all(earlier.in_order for earlier in self.pools[:place])
            for place in range(len(self.pools))
        )

    @cached_property
    def run(self) -> tuple[int, ...]:
        """The pools that hold the newest tokens without a gap, the oldest tokens' pool first."""
        held = [i for i, p in enumerate(self.pools) if p.keeps_run and self.unbroken[i]]
        return tuple(reversed(held))

    @cached_property
    def front(self) -> tuple[int, ...]:
        """All other pools: as the stream goes on, their tokens move closer to the present."""
        return tuple(i for i in range(len(self.pools)) if i not in self.run)

    @cached_property
    def quantized(self) -> tuple[int, ...]:
        """The pools whose slots are quantized, as they lie in the slab."""
        return tuple(i for i in (*self.front, *self.run) if self.formats[i])

    @cached_property
    def format(self) -> Format | None:
        """How quantized slots are written; None where there are none."""
        return FORMATS[self.formats[self.quantized[0]]] if self.quantized else None

    @cached_property
    def quantized_slots(self) -> int:
        """Quantized slots per KV head."""
        return self.slots_of(self.quantized)

    def slots_of(self, pools: Collection[int]) -> int:
        """Slots of some pools per KV head, those without a limit left out."""
        return sum(self.pools[i].slots() or 0 for i in pools)

    @cached_property
    def needs_mass(self) -> bool:
        """Whether a pool reads accumulated attention."""
        return any(pool.needs_mass for pool in self.pools)

    @cached_property
    def needs_queries(self) -> int:
        """How many of the last queries the pools read."""
        return max(pool.needs_queries for pool in self.pools)

    @cached_property
    def needs_shares(self) -> bool:
        """Whether a pool reads what each of these queries gave to each slot, not only sums."""
        return any(pool.needs_shares for pool in self.pools)

    @cached_property
    def needs_marks(self) -> bool:
        """Whether a pool reads what rows are told of their streams."""
        return any(pool.needs_marks for pool in self.pools)

    @cached_property
    def log_n(self) -> bool:
        """Whether logits are scaled by log_512 of the number of tokens a query sees."""
        return any(pool.log_n for pool in self.pools)

    @cached_property
    def two_weights(self) -> bool:
        """Whether a pool sets a and b apart."""
        return any(pool.two_weights for pool in self.pools)

    def fold(
        self, held: list[Slots], new: Slots, fold: Fold, states: list[dict[str, Tensor]]
    ) -> list[Slots]:
        """What each pool keeps when `new` enters the first, given what each holds and remembers.

        What a pool is to remember from now on takes the place of what it remembered, in `states`.

        Raises:
            WeirError: what a pool returns is not what a fold returns.
        """
        kept, like = [], new.tensors()
        for place, pool in enumerate(self.pools):
            its = replace(
                fold,
                draws=replace(fold.draws, pool=place),
                unbroken=self.unbroken[place],
                last=place == len(self.pools) - 1,
                state=states[place],
            )
            arrived, remembered = new, dict(states[place])
            folded = pool.fold(held[place], new, its)
            stays, new = check_fold(pool, folded, held[place], arrived, like)
            check_state(pool, remembered, its.state)
            kept.append(stays)
        return kept


def _written(pool: Pool, alone: bool = False) -> str:
    """A pool the way it is written in a policy: its first parameter, and what is not the default.

    Where it stands `alone` in its pipe, the name of a parameter tells it from the policy that is
    called the same.
    """
    words = []
    for place, f in enumerate(fields(cast(Any, pool))):
        value = getattr(pool, f.name)
        text = _written(value) if isinstance(value, Pool) else format_value(value)
        if place == 0:
            name = f"{f.name}=" if alone and pool.name in NAMED else ""
            words.append(f"{name}{text}")
        elif value != f.default:
            words.append(f"{f.name}={text}")
    return f"{pool.name}({', '.join(words)})"
