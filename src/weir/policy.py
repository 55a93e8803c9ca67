"""Policies: pipes of pools, their grammar, and the policies that have a name.

A policy is written the way one writes a shell pipe, `sink(4) | recent(252)`: tokens enter the first
pool, what overflows a pool flows into the next, what overflows the last is gone. A named policy,
`streaming_llm(budget=256)`, is a function that returns a pipe.
"""

from __future__ import annotations

import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from weir.errors import WeirError
from weir.pools import POOLS, Fold, Pool, Recent, Sink
from weir.slab import Slots


class PolicyError(WeirError):
    """A policy that cannot be read, or makes no sense.

    Attributes:
        text: the policy as it was given.
        at: the character the error is about, counted from 0.
    """

    def __init__(self, problem: str, text: str, at: int) -> None:
        line = "".join(c if c.isprintable() else " " for c in text)
        super().__init__(f"{problem} (character {at + 1}: {line[:at]}»{line[at:]})")
        self.text = text
        self.at = at


class Policy:
    """How a cache is held to its size. A `Pipe`, or something that only a `Stream` can do."""

    text: str

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """The pipe of one layer of a model that has `layers` of them."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Pipe(Policy):
    """Pools in the order tokens flow through them.

    Attributes:
        pools: the pools, the one where tokens enter first.
        text: the policy as it was written.
    """

    pools: tuple[Pool, ...]
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for place, pool in enumerate(self.pools):
            pool.check(self.pools[:place])
        if not self.text:
            object.__setattr__(self, "text", " | ".join(map(_written, self.pools)))

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
    def front_slots(self) -> int:
        """Slots of the front per KV head."""
        return sum(self.pools[i].slots() or 0 for i in self.front)

    @cached_property
    def needs_mass(self) -> bool:
        """Whether a pool reads accumulated attention."""
        return any(pool.needs_mass for pool in self.pools)

    @cached_property
    def needs_queries(self) -> int:
        """How many of the last queries the pools read."""
        return max(pool.needs_queries for pool in self.pools)

    @cached_property
    def two_weights(self) -> bool:
        """Whether a pool sets a and b apart."""
        return any(pool.two_weights for pool in self.pools)

    def fold(self, held: list[Slots], new: Slots, fold: Fold) -> list[Slots]:
        """What each pool keeps when `new` enters the first, given what each holds."""
        kept = []
        for pool, mine, unbroken in zip(self.pools, held, self.unbroken, strict=True):
            stays, new = pool.fold(mine, new, replace(fold, unbroken=unbroken))
            kept.append(stays)
        return kept


@dataclass(frozen=True)
class Recompute(Policy):
    """Sliding window with re-computation: the keys and values of the last tokens made anew.

    For every new token the model reads the last `budget` tokens from scratch: the quality oracle of
    StreamingLLM (Xiao et al. 2024, Figure 1c), and as slow as that sounds.
    """

    budget: int
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.text:
            object.__setattr__(self, "text", f"recompute({self.budget})")

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Refused: nothing is cached.

        Raises:
            WeirError: always.
        """
        raise WeirError(
            "recompute reads the window anew for every token, which a cache cannot do; "
            "use weir.Stream or `weir stream`"
        )


@dataclass(frozen=True)
class Named:
    """A policy with a name.

    Attributes:
        make: from its parameters to a policy.
        paper: where it comes from.
    """

    make: Callable[..., Policy]
    paper: str


NAMED: dict[str, Named] = {}
"""Every named policy."""


def named(paper: str) -> Callable[[Callable[..., Policy]], Callable[..., Policy]]:
    """Make a policy known under the name of the function that returns it."""

    def register(make: Callable[..., Policy]) -> Callable[..., Policy]:
        NAMED[make.__name__] = Named(make, paper)
        return make

    return register


@named("plain attention over everything; memory grows with the stream")
def dense() -> Policy:
    """Keep every token: exact, and without a limit."""
    return Pipe((Recent(None),))


@named("Beltagy et al. 2020, Longformer; StreamingLLM's Figure 1b")
def window(budget: int = 256) -> Policy:
    """Keep the newest tokens and nothing else; collapses once the first token has left."""
    return Pipe((Recent(budget),))


@named("Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks")
def streaming_llm(budget: int = 256, sinks: int = 4) -> Policy:
    """Keep the first tokens and the newest, at their positions in the cache."""
    if budget <= sinks:
        raise WeirError(
            f"a budget of {budget} leaves no room for recent tokens beside {sinks} sinks"
        )
    return Pipe((Sink(sinks), Recent(budget - sinks)) if sinks else (Recent(budget),))


@named("Xiao et al. 2024, Figure 1c: sliding window with re-computation")
def recompute(budget: int = 256) -> Policy:
    """Read the last tokens from scratch for every new token: the oracle, and slow."""
    if budget < 1:
        raise WeirError(f"recompute reads at least 1 token, not {budget}")
    return Recompute(budget)


def policy(text: str | Policy) -> Policy:
    """Read a policy: a pipe, `sink(4) | recent(252)`, or a name, `streaming_llm(budget=256)`.

    Raises:
        PolicyError: it cannot be read or makes no sense; the message points at the character.
        WeirError: it is neither text nor a policy.
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str):
        raise WeirError(
            f"a policy is text like 'sink(4) | recent(252)', not a {type(text).__name__}"
        )
    return _Reader(text).policy()


policy_of = policy
"""`policy`, where a parameter of that name hides it."""

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SPACE = re.compile(r"\s*")
_VALUES = {"true": True, "false": False, "none": None}


@dataclass
class _Call:
    """`name(arguments)` as it was read, with the places of its parts."""

    name: str
    at: int
    arguments: list[tuple[str | None, Any, int]]


class _Reader:
    """A recursive-descent reader of one policy."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def policy(self) -> Policy:
        calls = [self._call()]
        while self._take("|"):
            calls.append(self._call())
        if self.at < len(self.text):
            raise self._wrong("expected '|' or the end")
        if len(calls) == 1 and calls[0].name in NAMED:
            made = self._make(calls[0], NAMED[calls[0].name].make)
            object.__setattr__(made, "text", self.text.strip())
            return typing.cast(Policy, made)
        pools: list[Pool] = []
        for call in calls:
            pools.append(self._pool(call, tuple(pools)))
        return Pipe(tuple(pools), self.text.strip())

    def _pool(self, call: _Call, before: tuple[Pool, ...]) -> Pool:
        if call.name in NAMED:
            raise self._wrong(f"{call.name} is a whole policy, not a pool of a pipe", call.at)
        if call.name not in POOLS:
            names = [*POOLS, *NAMED]
            raise self._wrong(f"no pool or policy is called {call.name!r}", call.at, names)
        made: Pool = self._make(call, POOLS[call.name])
        try:
            made.check(before)
        except WeirError as error:
            raise self._wrong(str(error), call.at) from None
        return made

    def _make(self, call: _Call, make: Callable[..., Any]) -> Any:
        """Call `make` with the arguments, once they fit its signature."""
        parameters = inspect.signature(make).parameters
        hints = typing.get_type_hints(make.__init__ if isinstance(make, type) else make)
        given: dict[str, Any] = {}
        for place, (name, value, at) in enumerate(call.arguments):
            if name is None:
                if any(key for key, _, _ in call.arguments[:place]):
                    raise self._wrong("a value without a name cannot follow one with a name", at)
                if place >= len(parameters):
                    takes = ", ".join(parameters) or "none"
                    raise self._wrong(f"{call.name} has no such parameter (it takes {takes})", at)
                name = list(parameters)[place]
            elif name not in parameters:
                raise self._wrong(
                    f"{call.name} has no parameter {name!r}", at, list(parameters)
                )
            if name in given:
                raise self._wrong(f"{call.name} is given {name!r} twice", at)
            if not _fits(value, hints[name]):
                raise self._wrong(f"{name} must be {_kind(hints[name])}", at)
            given[name] = float(value) if hints[name] is float else value
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in given:
                raise self._wrong(f"{call.name} needs {name!r}", call.at)
        try:
            return make(**given)
        except PolicyError:
            raise
        except WeirError as error:
            raise self._wrong(str(error), call.at) from None

    def _call(self) -> _Call:
        name, at = self._word("a pool or a policy")
        arguments: list[tuple[str | None, Any, int]] = []
        if self._take("("):
            while not self._take(")"):
                if arguments and not self._take(","):
                    raise self._wrong("expected ',' or ')'")
                arguments.append(self._argument())
        return _Call(name, at, arguments)

    def _argument(self) -> tuple[str | None, Any, int]:
        self._skip()
        at = self.at
        if (word := _WORD.match(self.text, at)) is not None:
            self.at = word.end()
            if self._take("="):
                return word.group(), self._value(), at
            return None, _VALUES.get(word.group().lower(), word.group()), at
        return None, self._value(), at

    def _value(self) -> Any:
        self._skip()
        if (word := _WORD.match(self.text, self.at)) is not None:
            self.at = word.end()
            return _VALUES.get(word.group().lower(), word.group())
        if (number := _NUMBER.match(self.text, self.at)) is None:
            raise self._wrong("expected a value")
        value = float(number.group())
        if abs(value) > 2**53:
            raise self._wrong("no number here can be this large")
        self.at = number.end()
        return value if re.search(r"[.eE]", number.group()) else int(value)

    def _word(self, what: str) -> tuple[str, int]:
        self._skip()
        word = _WORD.match(self.text, self.at)
        if word is None:
            raise self._wrong(f"expected {what}")
        at, self.at = self.at, word.end()
        return word.group(), at

    def _take(self, mark: str) -> bool:
        self._skip()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        self._skip()
        return True

    def _skip(self) -> None:
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at

    def _wrong(
        self, problem: str, at: int | None = None, names: list[str] | None = None
    ) -> PolicyError:
        at = self.at if at is None else at
        word = _WORD.match(self.text, at)
        near = difflib.get_close_matches(word.group(), names or [], 1) if word else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return PolicyError(problem + hint, self.text, at)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from a policy can be passed for an annotation."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is types.NoneType:
        return value is None
    return isinstance(value, hint)


def _kind(hint: Any) -> str:
    """An annotation in words."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_kind(part) for part in typing.get_args(hint))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    return "none" if hint is types.NoneType else words.get(hint, str(hint))


def _written(pool: Pool) -> str:
    """A pool the way it is written in a policy."""
    values = [getattr(pool, f.name) for f in fields(typing.cast(Any, pool))]
    return f"{pool.name}({', '.join('none' if v is None else str(v) for v in values)})"
