"""Policies, and the usual one: a pipe of pools, one after the other.

Tokens enter the first pool of a pipe, what overflows a pool flows into the next, what overflows the
last is gone. `grammar` reads policies from text; the named ones are in `library`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self, cast

from torch import Tensor

from weir.errors import LONGEST, WeirError, format_value, quote
from weir.policies.checks import check_fold, check_formats, check_mass, check_place, check_state
from weir.policies.registry import NAMED, PolicyCall
from weir.pools import Fold, Pool
from weir.slab import FORMATS, Format, Slots

CHUNK = 64
"""Tokens between two folds by default."""


@dataclass(frozen=True)
class Origin:
    """Where a policy was measured.

    Attributes:
        file: the policy file that it was read from.
        model: the fingerprint of the model (`models.fingerprint`).
        told: the end of error messages about it: how a file that nobody named was chosen.
        chunk: tokens between two folds when it was measured; None if the file does not say.
    """

    file: str
    model: Mapping[str, Any]
    told: str = ""
    chunk: int | None = None


class Policy(ABC):
    """A rule that holds a cache to its size.

    Attributes:
        text: the policy as it was written, or as it can be.
        called: how it was called, if it was made by its name; None for one made of pools.
        is_pipe: whether it is a pipe, or the pyramid of one.
    """

    is_pipe: ClassVar[bool] = False
    text: str
    called: PolicyCall | None = None

    @abstractmethod
    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the pipe of one layer of a model that has `layers` of them."""

    def for_heads(self, layer: int, layers: int, heads: int) -> tuple[Pipe, ...]:
        """Return the pipe of each of a layer's `heads` KV heads."""
        return (self.for_layer(layer, layers),) * heads

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The pipes known without a model: a layer's on average, or that of each layer."""
        return (self.for_layer(0, 1),)

    @property
    def origin(self) -> Origin | None:
        """Where it was measured; None for most policies."""
        return None

    @property
    def stands_for(self) -> str:
        """Its pools, as text that reads as the same policy: `sink(4) | reservoir(16)`."""
        return self.text

    @property
    def brief(self) -> str:
        """The text, or a summary where that is a long list of layers."""
        return self.text

    def as_written(self, text: str, called: PolicyCall) -> Self:
        """Return the same policy, with this text and this call."""
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
    """Return the tokens between two folds: as asked for, as measured, or 64."""
    if chunk is not None:
        return chunk
    measured = None if policy.origin is None else policy.origin.chunk
    return CHUNK if measured is None else measured


def _of_any(name: str) -> cached_property[bool]:
    """Make a property of a `Pipe` that says whether a pool has the property of this name."""
    return cached_property(lambda pipe: any(getattr(pool, name) for pool in pipe.pools))


@dataclass(frozen=True, repr=False)
class Pipe(Policy):
    """Pools in the order tokens flow through them.

    Attributes:
        pools: the pools, the one where tokens enter first.
        text: the policy as it was written.
        formats: the format of each pool's slots, by the names of `slab.FORMATS`; "" for exact
            ones. Without any, all are exact.
    """

    is_pipe = True

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
        check_mass(self.pools)
        if not self.text:
            object.__setattr__(self, "text", self.stands_for)

    @property
    def stands_for(self) -> str:
        """Its pools, the way they are written."""
        alone = len(self.pools) == 1
        return " | ".join(
            _format_pool(pool, alone) + (f":{name}" if name else "")
            for pool, name in zip(self.pools, self.formats, strict=True)
        )

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the same pipe for every layer."""
        return self

    @cached_property
    def slots(self) -> int | None:
        """Slots per KV head; None where a pool has no limit."""
        sizes = [pool.slots() for pool in self.pools]
        return None if None in sizes else sum(size for size in sizes if size is not None)

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
        """The pools whose slots are quantized, in the order of the slab."""
        return tuple(i for i in (*self.front, *self.run) if self.formats[i])

    @cached_property
    def format(self) -> Format | None:
        """The format of quantized slots; None where there are none."""
        return FORMATS[self.formats[self.quantized[0]]] if self.quantized else None

    @cached_property
    def quantized_slots(self) -> int:
        """Quantized slots per KV head."""
        return self.slots_of(self.quantized)

    def slots_of(self, pools: Collection[int]) -> int:
        """Count the slots of some pools per KV head, those without a limit left out."""
        return sum(self.pools[i].slots() or 0 for i in pools)

    needs_mass = _of_any("needs_mass")
    needs_second_reading = _of_any("needs_second_reading")
    needs_shares = _of_any("needs_shares")
    needs_gates = _of_any("needs_gates")
    needs_marks = _of_any("needs_marks")
    log_n = _of_any("log_n")
    two_weights = _of_any("two_weights")

    @cached_property
    def needs_queries(self) -> int:
        """The number of last queries that the pools read."""
        return max(pool.needs_queries for pool in self.pools)

    def fold(
        self, held: list[Slots], new: Slots, fold: Fold, states: list[dict[str, Tensor]]
    ) -> list[Slots]:
        """Let tokens enter the first pool, and return what each pool keeps.

        Args:
            held: the slots of each pool.
            new: the tokens that arrive.
            fold: what all pools may know.
            states: what each pool remembers; its new state takes the place of the old one.
        """
        kept, like = [], new.tensors()
        for place, pool in enumerate(self.pools):
            own = replace(
                fold,
                draws=replace(fold.draws, pool=place),
                unbroken=self.unbroken[place],
                last=place == len(self.pools) - 1,
                state=states[place],
            )
            arrived, before = new, dict(states[place])
            folded = pool.fold(held[place], new, own)
            stays, new = check_fold(pool, folded, held[place], arrived, like)
            check_state(pool, before, own.state)
            kept.append(stays)
        return kept


def _format_pool(pool: Pool, alone: bool = False) -> str:
    """Write a pool as in a policy: its first parameter, and those that differ from the default.

    A pool `alone` in its pipe that shares its name with a policy names the parameter.
    """
    words = []
    for place, f in enumerate(fields(cast(Any, pool))):
        value = getattr(pool, f.name)
        text = _format_pool(value) if isinstance(value, Pool) else format_value(value)
        if place == 0:
            name = f"{f.name}=" if alone and pool.name in NAMED else ""
            words.append(f"{name}{text}")
        elif value != f.default:
            words.append(f"{f.name}={text}")
    return f"{pool.name}({', '.join(words)})"


@dataclass(frozen=True, repr=False)
class Layered(Policy):
    """A policy for each layer.

    Layers that slide over a window of their own keep it under any policy, and are not counted.

    Attributes:
        policies: the policy of each layer, bottom up.
        origin: where they were measured; None for those that were written by hand. It is no part
            of what the policy is: its text can be read on any model of so many layers.
    """

    policies: tuple[Policy, ...]
    text: str = field(default="", compare=False)
    origin: Origin | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.policies or not all(isinstance(policy, Policy) for policy in self.policies):
            raise WeirError(
                "a policy for each layer is a list of one policy or more, [h2o(96), h2o(160)]"
            )
        self.pipes  # noqa: B018  (raises where a policy has no pipe for its layer)
        if not self.text:
            object.__setattr__(self, "text", f"[{', '.join(map(str, self.policies))}]")

    @property
    def stands_for(self) -> str:
        """The same list in pools."""
        return f"[{', '.join(policy.stands_for for policy in self.policies)}]"

    @property
    def brief(self) -> str:
        """The text; of a long list the number of layers, and their slots."""
        if len(self.text) <= LONGEST or len(self.policies) == 1:
            return self.text
        sizes = sorted({pipe.slots for pipe in self.pipes if pipe.slots is not None})
        some = " to ".join(f"{slots:,}" for slots in dict.fromkeys(sizes[:1] + sizes[-1:]))
        by_head = any(isinstance(policy, ByHead) for policy in self.policies)
        each = "policies for the KV heads of" if by_head else "a policy for each of"
        return f"{each} {len(self.policies)} layers, {some or 'any number of'} slots"

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The pipe of every layer, or of every KV head of one whose heads have their own."""
        count = len(self.policies)
        each = (
            policy.pipes if isinstance(policy, ByHead) else (policy.for_layer(layer, count),)
            for layer, policy in enumerate(self.policies)
        )
        return tuple(pipe for pipes in each for pipe in pipes)

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the pipe of a layer, if the model has as many layers."""
        return self._of(layer, layers).for_layer(layer, layers)

    def for_heads(self, layer: int, layers: int, heads: int) -> tuple[Pipe, ...]:
        """Return the pipes of a layer's KV heads, if the model has as many layers and heads."""
        return self._of(layer, layers).for_heads(layer, layers, heads)

    def _of(self, layer: int, layers: int) -> Policy:
        if layers != len(self.policies):
            source, told = quote(self.text), ""
            if self.origin is not None:
                source, told = self.origin.file, self.origin.told
            raise WeirError(
                f"{source} has policies for {len(self.policies)} layers, and this model has "
                f"{layers} that a policy holds{told}"
            )
        return self.policies[layer]


class ByHead(Layered):
    """A policy for each KV head of one layer, in the list of a `Layered`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(isinstance(policy, Layered) for policy in self.policies):
            raise WeirError("lists of policies are two deep at most: for layers, and for KV heads")

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Refuse to give one pipe for the whole layer (WeirError)."""
        raise WeirError(
            f"{quote(self.text)} in a list is for the KV heads of a layer, and one policy for the "
            "whole of it is wanted here"
        )

    def for_heads(self, layer: int, layers: int, heads: int) -> tuple[Pipe, ...]:
        """Return the pipes, if the layer has as many KV heads."""
        if heads != len(self.policies):
            raise WeirError(
                f"{quote(self.text)} has policies for {len(self.policies)} KV heads, and layer "
                f"{layer} of this model has {heads} here"
            )
        return tuple(policy.for_layer(layer, layers) for policy in self.policies)
