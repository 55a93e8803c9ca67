"""What a pool is: a rule for who holds its slots.

To add one: a frozen dataclass of its parameters, with `@pool("name")`, a method that says how many
slots it needs and one that folds. Nothing else in weir has to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

from weir.draws import Draws
from weir.slab import Slots

POOLS: dict[str, type[Pool]] = {}
"""Every pool by the name it has in a policy."""


@dataclass(frozen=True)
class Fold:
    """What a pool may know when it folds.

    Attributes:
        draws: this layer's random numbers.
        layer, layers: which layer this is, and of how many.
        seen: tokens of the stream so far [batch], int64.
        scale: the factor of the logits, usually 1/sqrt(key_dim).
        queries: the last queries, as the attention sees them at their own place in the stream
            [batch, kv_heads, group, n, key_dim]; None unless a pool of the pipe asks for them.
        prompt: true when a whole prompt is folded at once (`prefill="full"`).
        unbroken: true while nothing was lost upstream: arrivals come in order, each the successor
            of the last.
    """

    draws: Draws
    layer: int
    layers: int
    seen: Tensor
    scale: float
    queries: Tensor | None = None
    prompt: bool = False
    unbroken: bool = True


class Pool(ABC):
    """A rule for who holds some slots of each KV head.

    Attributes:
        name: its name in a policy.
        needs_mass: it reads `Slots.mass`, the attention each token received.
        needs_queries: how many of the last queries it reads.
        two_weights: it sets a and b apart.
        keeps_run: its slots are the newest tokens, without a gap, whenever its arrivals are.
        in_order: every token it does not keep flows on, in the order of arrival.
    """

    name: ClassVar[str]
    needs_mass: ClassVar[bool] = False
    two_weights: ClassVar[bool] = False
    keeps_run: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse a place in a pipe that makes no sense, given the pools in front of it.

        Raises:
            WeirError: with the reason.
        """

    @property
    def needs_queries(self) -> int:
        """How many of the last queries the pool reads when it folds."""
        return 0

    @abstractmethod
    def slots(self) -> int | None:
        """How many slots per KV head it may hold; None if there is no limit."""

    @abstractmethod
    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Decide who stays: (kept, overflow), from what is held and what arrives.

        `kept` has at most `slots()` slots. Heads may keep different tokens; where they keep
        different numbers of them, the missing slots are empty. Returning `held` itself says that
        nothing changed.
        """


Kind = TypeVar("Kind", bound=type[Pool])


def pool(name: str) -> Callable[[Kind], Kind]:
    """Make a pool known under `name` in policies."""

    def register(kind: Kind) -> Kind:
        kind.name = name
        POOLS[name] = kind
        return kind

    return register
