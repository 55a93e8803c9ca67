"""Policies and pipes, which are sequences of pools.

Tokens enter the first pool of a pipe. Tokens that overflow a pool enter the next one, and tokens
that overflow the last pool are evicted. `grammar` reads policies from text, and `library` has the
named ones.

Users can write pools, so the place of a pool in its pipe is checked, and the slots that it returns
are checked before they reach the slab: their number, and the types and shapes of their tensors. Of
pools that are not weir's, positions are also checked, to find tokens that were both kept and passed
on. The numbers in keys and values are never checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from weir.errors import WeirError, format_value, in_words, quote
from weir.policies.registry import NAMED, PolicyCall
from weir.pools import Fold, Pool, Recent, check_declared, fits, is_own, name_failure
from weir.slab import FORMATS, Format, QuantizedSlots, Slots, is_longer

CHUNK = 64
"""The default number of tokens between two folds."""


@dataclass(frozen=True)
class Origin:
    """The origin of a measured policy.

    Attributes:
        file: the policy file that it was read from.
        model: the fingerprint of the model (`models.fingerprint`).
        told: the end of error messages about the policy. If the user did not name the file, it says
            how the file was chosen; otherwise it is empty.
        chunk: tokens between two folds in the measurement; None if the file does not say.
    """

    file: str
    model: Mapping[str, Any]
    told: str = ""
    chunk: int | None = None


class Policy(ABC):
    """A rule that decides which tokens a cache keeps.

    Attributes:
        text: the policy as it was written, or as it can be written.
        called: the call that made it, if it was made by its name; None for a policy made of pools.
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
        """The pipes that are known without a model: the average one, or that of each layer."""
        return (self.for_layer(0, 1),)

    @property
    def origin(self) -> Origin | None:
        """Its origin, if it was measured. None for most policies."""
        return None

    @property
    def stands_for(self) -> str:
        """Its pools, as text that reads as the same policy: `sink(4) | reservoir(16)`."""
        return self.text

    @property
    def brief(self) -> str:
        """The text, or a summary if the text is a long list of layers."""
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
    """Return the tokens between two folds: the given number, the measured one, or 64."""
    if chunk is not None:
        if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
            raise WeirError(f"chunk must be a whole number of at least 1, got {chunk!r}")
        return chunk
    measured = None if policy.origin is None else policy.origin.chunk
    return CHUNK if measured is None else measured


def _of_any(name: str) -> cached_property[bool]:
    """Make a property of a `Pipe` that says whether any of its pools has the property with this
    name.
    """
    return cached_property(lambda pipe: any(getattr(pool, name) for pool in pipe.pools))


@dataclass(frozen=True, repr=False)
class Pipe(Policy):
    """Pools in the order in which tokens flow through them.

    Attributes:
        pools: the pools; tokens enter the first one.
        text: the policy as it was written.
        formats: the format of each pool's slots, by the names of `slab.FORMATS`; "" for exact
            slots. If empty, all slots are exact.
    """

    is_pipe = True

    pools: tuple[Pool, ...]
    text: str = field(default="", compare=False)
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.pools or not all(isinstance(pool, Pool) for pool in self.pools):
            raise WeirError(
                "a pipe must have at least one pool, as in Pipe((Sink(4), Recent(252)))"
            )
        for place, pool in enumerate(self.pools):
            check_place(pool, self.pools[:place])
        object.__setattr__(self, "formats", self.formats or ("",) * len(self.pools))
        _check_formats(self.pools, self.formats, self.run)
        if not self.text:
            object.__setattr__(self, "text", self.stands_for)

    @property
    def stands_for(self) -> str:
        """Its pools, as they are written in a policy."""
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
        sizes = [0 if pool.shares_slots else pool.slots() for pool in self.pools]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @cached_property
    def keeps_all(self) -> bool:
        """Whether it keeps every token exactly as the model computes it, as `dense` does."""
        last = self.pools[-1]
        return isinstance(last, Recent) and last.n is None and not self.quantized

    @cached_property
    def unbroken(self) -> tuple[bool, ...]:
        """For each pool, whether its arrivals are in order and without gaps, because all pools
        before it pass tokens on in order.
        """
        return tuple(
            all(earlier.in_order for earlier in self.pools[:place])
            for place in range(len(self.pools))
        )

    @cached_property
    def run(self) -> tuple[int, ...]:
        """The places of the pools that hold the newest tokens without a gap. The pool with the
        oldest of these tokens comes first.
        """
        held = [i for i, p in enumerate(self.pools) if p.keeps_run and self.unbroken[i]]
        return tuple(reversed(held))

    @cached_property
    def front(self) -> tuple[int, ...]:
        """The places of all other pools. As the stream goes on, the positions of their tokens are
        moved up to those of the newest tokens (the rolling frame).
        """
        return tuple(i for i in range(len(self.pools)) if i not in self.run)

    @cached_property
    def quantized(self) -> tuple[int, ...]:
        """The places of the pools with quantized slots, in the order of the slab."""
        return tuple(i for i in (*self.front, *self.run) if self.formats[i])

    @cached_property
    def format(self) -> Format | None:
        """The format of quantized slots. None if there are none."""
        return FORMATS[self.formats[self.quantized[0]]] if self.quantized else None

    @cached_property
    def quantized_slots(self) -> int:
        """Quantized slots per KV head."""
        return self.slots_of(self.quantized)

    def slots_of(self, pools: Collection[int]) -> int:
        """Count the slots per KV head of the pools at some places. Pools without a limit are left
        out, and so are pools that share the slots of the pipe's first pool.
        """
        counted = (self.pools[i] for i in pools if not self.pools[i].shares_slots)
        return sum(pool.slots() or 0 for pool in counted)

    def too_many_shared(self, lengths: Sequence[int]) -> bool:
        """Return whether the first pool and the pools that share its slots hold more tokens than it
        has slots. `lengths` are the numbers of tokens that the pools hold.
        """
        pairs = zip(self.pools, lengths, strict=True)
        shared = sum(length for pool, length in pairs if pool.shares_slots)
        return bool(shared) and lengths[0] + shared > (self.pools[0].slots() or 0)

    needs_mass = _of_any("needs_mass")
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
        """Let tokens enter the first pool, and return the tokens that each pool keeps.

        Args:
            held: the slots of each pool.
            new: the tokens that arrive.
            fold: the facts about this fold that all pools can use.
            states: the state of each pool; the new state replaces the old one.
        """
        kept, like = [], new.tensors()
        last_run = max(self.run, default=-1)
        if last_run < 0:
            new = _without_dropped(new)
        for place, pool in enumerate(self.pools):
            own = replace(
                fold,
                draws=replace(fold.draws, pool=place),
                unbroken=self.unbroken[place],
                last=place == len(self.pools) - 1,
                state=_PoolState(pool, states[place]),
            )
            arrived, before = new, dict(states[place])
            with name_failure(pool, "fold"):
                folded = pool.fold(held[place], new, own)
            stays, new = _check_fold(pool, folded, held[place], arrived, like)
            _check_state(pool, before, own.state)
            states[place].update(own.state)
            kept.append(stays)
            if place == last_run:
                new = _without_dropped(new)
        return kept


class _PoolState(dict[str, Tensor]):
    """The state of a pool in a fold. A name that the pool did not declare is an error."""

    def __init__(self, pool: Pool, state: Mapping[str, Tensor]) -> None:
        super().__init__(state)
        self._pool = pool

    def __missing__(self, name: str) -> Tensor:
        declared = ", ".join(map(quote, sorted(self))) or "nothing"
        raise WeirError(
            f"the pool {self._pool.name} reads the state {quote(name)}, but its state() declares "
            f"{declared}. Return a tensor for {quote(name)} from state()."
        )


def _without_dropped(slots: Slots) -> Slots:
    """Leave out tokens that were dropped while they were among the newest. They have no weight."""
    counts = ~(slots.a.isneginf() & slots.b.isneginf())
    return slots if bool(counts.all()) else slots.only(counts)


def _format_pool(pool: Pool, alone: bool = False) -> str:
    """Write a pool as in a policy: its first parameter, and parameters that differ from the
    default.

    A pool that is `alone` in its pipe and shares its name with a policy names the parameter.
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


def check_place(pool: Pool, before: tuple[Pool, ...]) -> None:
    """Refuse a pool that makes no sense in a pipe after the pools `before`."""
    if not isinstance(getattr(pool, "name", None), str):
        kind = type(pool).__name__
        raise WeirError(f'{kind} has no name in policies. Write @pool("a_name") above its class.')
    with name_failure(pool, "slots"):
        slots = pool.slots()
    if not fits(slots, int | None) or (slots is not None and slots < 0):
        raise WeirError(
            f"slots() of the pool {pool.name} must be a whole number of at least 0, or None for "
            f"no limit, got {quote(slots)}"
        )
    check_declared(pool)
    for earlier in before:
        if earlier.ends_pipe:
            raise WeirError(
                f"{pool.name} would get no tokens: {earlier.name} keeps or represents every "
                f"token, so no token leaves it. Put {earlier.name} last in the pipe."
            )
    with name_failure(pool, "check"):
        pool.check(before)


def check_format(name: object) -> str:
    """Return the name of a format of slots, if there is such a format."""
    if not isinstance(name, str) or name not in FORMATS:
        raise WeirError(
            f"unknown format of slots {quote(name)}. Use one of {', '.join(FORMATS)}. For exact "
            "slots, use slots=exact in weir, centers or --slots; elsewhere, leave the format or "
            "quantized out"
        )
    return name


def _check_formats(pools: tuple[Pool, ...], formats: tuple[str, ...], run: tuple[int, ...]) -> None:
    """Refuse formats that a slab cannot have ("" for exact slots).

    `run` has the places of the pools that hold the newest tokens (`Pipe.run`).
    """
    if len(formats) != len(pools):
        raise WeirError(f"{len(pools)} pools need {len(pools)} formats, got {len(formats)}")
    different = {check_format(name) for name in formats if name}
    if len(different) > 1:
        both = " and ".join(sorted(different))
        raise WeirError(f"all quantized slots of a pipe must have the same format, got {both}")
    for pool, name in zip(pools, formats, strict=True):
        if name and pool.synthetic:
            raise WeirError(
                f"the slots of {pool.name} change at every fold and would be quantized again each "
                f"time, so they must stay exact. Write {pool.name} without :{name}."
            )
    for pool, name in zip(pools, formats, strict=True):
        if pool.shares_slots and name != formats[0]:
            raise WeirError(
                f"{pool.name} shares the slots of {pools[0].name}, so both must have the same "
                f"format. Write :{name or formats[0]} after both, or after neither."
            )
    if different and any(pool.slots() is None for pool in pools):
        raise WeirError(
            "a pipe without a limit cannot have quantized slots. Give each pool a size."
        )
    quantized = [bool(formats[place]) for place in run]
    if quantized != sorted(quantized, reverse=True):
        raise WeirError(
            "among the newest tokens, the older ones must be quantized and the newer ones exact. "
            "Write recent(64) | recent(64):int8, not the reverse."
        )


def _check_fold(
    pool: Pool, folded: Any, held: Slots, new: Slots, like: Mapping[str, Tensor]
) -> tuple[Slots, Slots]:
    """Check that the result of a pool's `fold` is a pair of slots (kept, overflow), and return it.

    `like` has tensors with the shapes of the layer's slots, by name.
    """
    name = pool.name
    parts = folded if isinstance(folded, tuple) else ()
    if len(parts) != 2 or not all(isinstance(part, Slots) for part in parts):
        found = f"({', '.join(type(part).__name__ for part in parts)})"
        found = found if isinstance(folded, tuple) else type(folded).__name__
        raise WeirError(
            f"the fold of the pool {name} must return two Slots, (kept, overflow), got {found}"
        )
    kept, overflow = parts
    for what, slots in (("kept", kept), ("passed on", overflow)):
        if slots is not held and slots is not new:
            _check_tensors(f"the slots that the pool {name} {what}", slots, held, like)
    limit = pool.slots()
    if limit is not None and len(kept) > limit:
        raise WeirError(
            f"the pool {name} kept {in_words(len(kept), 'slot')}, and its limit is {limit}. Return "
            "the others as overflow."
        )
    if not is_own(type(pool)):  # tests check weir's own pools
        _check_twice(name, kept, overflow)
    return kept, overflow


def _check_twice(name: str, kept: Slots, overflow: Slots) -> None:
    """Refuse tokens that a pool has both kept and passed on, because they would count twice."""
    if not len(kept) or not len(overflow):
        return
    gone = overflow.position.masked_fill(~overflow.held, -1).sort(dim=2).values
    at = torch.searchsorted(gone, kept.position.contiguous()).clamp_max(len(overflow) - 1)
    if bool(((gone.gather(2, at) == kept.position) & kept.held).any()):
        raise WeirError(
            f"the pool {name} has kept tokens that it has also passed on as overflow. Return each "
            "token in one of the two."
        )


def _check_tensors(owner: str, slots: Slots, held: Slots, like: Mapping[str, Tensor]) -> None:
    """Refuse slots that lack tensors shaped as `like`, or whose dtype differs from `like` and
    `held`.

    Keys and values in stored form are not read. They are parts of existing slots.
    """
    there = slots.others() if _is_stored(slots) else like
    count = slots.position.shape[2:3] if isinstance(slots.position, Tensor) else ()
    for name, wanted in like.items():
        if name not in there:
            continue
        shape = (*wanted.shape[:2], *count, *wanted.shape[3:])
        found = getattr(slots, name)
        if not isinstance(found, Tensor):
            raise WeirError(f"{name} of {owner} must be a tensor")
        if found.shape != shape:
            raise WeirError(
                f"{name} of {owner} must have the shape {list(shape)}, got {list(found.shape)}"
            )
        if found.dtype == wanted.dtype and found.device == wanted.device:
            continue
        before = held.others() if _is_stored(held) else held.tensors()
        if found.dtype != before.get(name, wanted).dtype or found.device != wanted.device:
            raise WeirError(
                f"{name} of {owner} must be {wanted.dtype} on {wanted.device}, got {found.dtype} "
                f"on {found.device}"
            )
    if "mass" not in like and slots.mass is not None:
        raise WeirError(
            f"mass of {owner} is not stored, because the pool does not set needs_mass = True. "
            "Set it in the pool's class, or leave mass out."
        )


def _is_stored(slots: Slots) -> bool:
    """Return whether keys and values are still in stored form."""
    return isinstance(slots, QuantizedSlots) and slots.pieces is not None


def _check_state(pool: Pool, before: Mapping[str, Tensor], after: Mapping[str, Any]) -> None:
    """Refuse a pool's state with other names, dtypes, devices or shapes than `Pool.state` gave.

    A pool without a limit may make its tensors longer.
    """
    if before.keys() != after.keys():
        now, was = (", ".join(sorted(names)) or "nothing" for names in (after, before))
        raise WeirError(f"the state of the pool {pool.name} has {now} instead of {was}")
    for name, old in before.items():
        new = after[name]
        if not isinstance(new, Tensor) or (new.dtype, new.device) != (old.dtype, old.device):
            kind = f"{new.dtype}" if isinstance(new, Tensor) else type(new).__name__
            raise WeirError(
                f"the state {name} of the pool {pool.name} must be {old.dtype} on {old.device}, "
                f"got {kind}"
            )
        if new.shape != old.shape and not (pool.slots() is None and is_longer(new, old)):
            raise WeirError(
                f"the state {name} of the pool {pool.name} must have the shape {list(old.shape)}, "
                f"got {list(new.shape)}"
            )
