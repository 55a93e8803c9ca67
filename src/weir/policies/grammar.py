"""The parser of policies such as `sink(4) | recent(252)`, with errors that point at a character.

It finds pools and named policies in their registries, and parameters in their signatures, so a new
pool or policy needs no change here.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any, ClassVar

from weir.errors import PolicyError, WeirError, find_nearest, quote
from weir.policies.file import is_file, read_policy_file
from weir.policies.layered import ByHead, Layered
from weir.policies.pipe import Origin, Pipe, Policy, check_format, check_place
from weir.policies.registry import NAMED, PolicyCall, check_not_a_pool, load_plugins
from weir.pools import CONSTANTS, POOLS, WORD, Pool, argument_hints, convert_argument
from weir.slab import FORMATS

NUMBER = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
LIST = "["
"""Begins a list with a policy for each layer or, inside that list, for each KV head."""
DEEPEST = 8
"""The deepest nesting of policies: quantized(pinned(pyramid(sink(4) | snap(252)))) has depth 3."""
_SPACE = re.compile(r"\s*")


def parse_policy(text: str | PathLike[str] | Policy) -> Policy:
    """Read a policy: a pipe such as `sink(4) | recent(252)`, or a name such as
    `streaming_llm(budget=256)`.

    A path, or a text that ends with `.toml`, is the name of a policy file, which `weir calibrate`
    writes. The resulting policy is complete and no longer needs the file.

    Raises:
        PolicyError: the text cannot be read or makes no sense; the message points at the character.
        WeirError: the argument is neither text, a path nor a policy, or the policy file does not
            exist or is not valid.
    """
    if isinstance(text, Policy):
        return text
    if isinstance(text, PathLike):
        return from_file(fspath(text))
    if not isinstance(text, str):
        kind = type(text).__name__
        raise WeirError(
            f"a policy must be a text such as 'sink(4) | recent(252)', got a value of type {kind}"
        )
    return from_file(text.strip()) if is_file(text) else Parser(text).policy()


policy = parse_policy
"""`parse_policy`, under the name that users know."""


def saved_policy(text: str) -> Policy:
    """Read a policy that weir wrote into a session or a policy file. It never names a file.

    A call that `parse_policy` refuses because it could mean a pool or the policy with the same name
    is the pool here.
    """
    return Parser(text, saved=True).policy()


def from_file(path: str) -> Layered:
    """Read a policy file."""
    made = read_policy_file(path)
    policies = []
    for layer, text in enumerate(made.layers):
        try:
            policies.append(saved_policy(text))
        except PolicyError as error:
            raise WeirError(
                f"{path} has a policy for layer {layer} that cannot be read: {error}"
            ) from None
    return Layered(tuple(policies), origin=Origin(path, made.model, chunk=made.chunk))


def parse_call(text: str) -> PolicyCall | None:
    """Read the call of a named policy without making the policy, which may still need a budget.

    Returns None for a pipe of pools, a list of policies or a policy file, for a name that no policy
    has, and for arguments that the policy does not have. Raises PolicyError if the first call
    cannot be read.
    """
    parser = Parser(text)
    if is_file(text) or parser.take(LIST):
        return None
    call = parser.call()
    if parser.at < len(text) or call.name not in NAMED:
        return None
    bare = PolicyCall(call.name, {}, call.inside)
    parameters = list(bare.parameters)
    if len(call.arguments) > len(parameters):
        return None
    names = [given.name or parameters[place] for place, given in enumerate(call.arguments)]
    # With an unknown parameter, the call is the pool with the same name, or it is wrong.
    if not set(names) <= set(parameters):
        return None
    values = (given.value for given in call.arguments)
    texts = [value.text if isinstance(value, ParsedPolicy) else value for value in values]
    return replace(bare, given=dict(zip(names, texts, strict=True)))


@dataclass
class CallSyntax:
    """The call `name(arguments)` as it was read.

    Attributes:
        name: the name of the pool or policy that is called.
        at: the index of the call's first character in the parsed text.
        arguments: the arguments, in order.
        inside: the text between the parentheses.
    """

    name: str
    at: int
    arguments: list[Argument]
    inside: str = ""


class ParsedPolicy(typing.NamedTuple):
    """A pipe or a list of policies, as it was read.

    Attributes:
        calls: the calls of a pipe; empty for a list.
        formats: the format of each call's slots, "" for exact ones.
        text: the text of this pipe or list.
        at: the index of its first character in the text that the parser reads.
        layers: the policies of a list.
    """

    calls: list[CallSyntax]
    formats: list[str]
    text: str
    at: int
    layers: tuple[ParsedPolicy, ...] = ()


class Argument(typing.NamedTuple):
    """`name=value`, or only a value, with the characters where it and its value begin."""

    name: str | None
    value: Any
    at: int
    value_at: int


class Parser:
    """A recursive-descent parser of one policy, and of other texts made of calls.

    Attributes:
        text: the text to read.
        at: the next character to read.
        saved: whether weir wrote the text, rather than a user.
        depth: how many policies are open around the one that is being read.
        name: the pattern of names.
        kind: what the name of a call can stand for, as error messages say it.
    """

    name: ClassVar[re.Pattern[str]] = WORD
    kind: ClassVar[str] = "a pool or a policy"

    def __init__(self, text: str, at: int = 0, *, saved: bool = False) -> None:
        self.text = text
        self.at = at
        self.saved = saved
        self.depth = 0

    def policy(self) -> Policy:
        """Read the whole text as a policy."""
        made = self.part()
        if self.at < len(self.text):
            raise self.wrong("expected '|' or the end")
        return made

    def part(self) -> Policy:
        """Read the policy that begins here."""
        return self._make_policy(self._parse())

    def _parse(self) -> ParsedPolicy:
        """Read calls separated by bars, or a list."""
        self._skip()
        start = self.at
        if self.take(LIST):
            layers = [self._parse_inner()]
            while not self.take("]"):
                if not self.take(","):
                    raise self.wrong("expected ',' or ']'")
                layers.append(self._parse_inner())
            return ParsedPolicy([], [], self.text[start : self.at].strip(), start, tuple(layers))
        calls, formats = [self.call()], [self._format()]
        while self.take("|"):
            calls.append(self.call())
            formats.append(self._format())
        return ParsedPolicy(calls, formats, self.text[start : self.at].strip(), start)

    def _make_policy(self, part: ParsedPolicy) -> Policy:
        """Make the policy from the parsed parts."""
        if part.layers:
            with self._pointing(part.at):
                return Layered(tuple(map(self._make_layer, part.layers)), part.text)
        first = part.calls[0]
        if len(part.calls) == 1 and _is_named(first) and not part.formats[0]:
            made: Policy = self.make(first, NAMED[first.name].make)
            assert made.called is not None
            return made.as_written(part.text, replace(made.called, arguments=first.inside))
        if len(part.calls) == 1 and not part.formats[0] and not self.saved:
            self._check_ambiguous(first)
        pools: list[Pool] = []
        for call in part.calls:
            pools.append(self._pool(call, tuple(pools)))
        with self._pointing(part.at):
            return Pipe(tuple(pools), part.text, tuple(part.formats))

    def _make_layer(self, part: ParsedPolicy) -> Policy:
        """Make the policy of a layer in a list for layers. A list in that list is for KV heads."""
        if not part.layers:
            return self._make_policy(part)
        return ByHead(tuple(map(self._make_policy, part.layers)), part.text)

    def _check_ambiguous(self, call: CallSyntax) -> None:
        """Refuse a call of a pool, alone in its pipe, if the user may have meant the policy with
        the same name.

        As the pool, `kcenter(256, quiet=2)` would be 256 centers and no newest token. A call that
        names all of its arguments is taken as the pool.
        """
        both = call.name in NAMED and call.name in POOLS
        if not both or all(given.name for given in call.arguments):
            return
        odd, of_pool = _pools_own(call)[0], inspect.signature(POOLS[call.name]).parameters
        problem = f"{call.name} on its own is the policy, and {odd.name} is a parameter of the pool"
        number, *others = call.arguments
        if number.name is None and all(given.name in of_pool for given in others):
            ways = []
            size, more = number.value, call.inside.partition(",")[2]
            if type(size) is int and size > 1 and self.make(call, POOLS[call.name]).slots() == size:
                newest = min(64, size // 4 or 1)
                pool = f"{call.name}({size - newest},{more})"
                ways.append(f"recent({newest}) | {pool} for the newest tokens followed by the pool")
            ways.append(f"{call.name}({next(iter(of_pool))}={call.inside}) for only the pool")
            problem += f". Write {', or '.join(ways)}"
        raise self.wrong(problem, odd.at)

    def _format(self) -> str:
        """Read the format of the slots of the preceding pool. "" if there is none."""
        if not self.take(":"):
            return ""
        name, at = self._word("a format of slots")
        try:
            return check_format(name)
        except WeirError as error:
            raise self.wrong(str(error), at, list(FORMATS)) from None

    def _pool(self, call: CallSyntax, before: tuple[Pool, ...] | None) -> Pool:
        """Make the pool of a call that follows the pools `before` (None inside another pool)."""
        if call.name in NAMED and call.name not in POOLS:
            raise self.wrong(
                f"{call.name} is a whole policy and cannot be a pool in a pipe", call.at
            )
        if call.name not in POOLS:
            names = [*POOLS, *NAMED]
            raise self.wrong(
                f"unknown pool or policy {quote(call.name)}",
                call.at,
                names,
                advice="See `weir policies`, or import your own: weir --import FILE",
            )
        made: Pool = self.make(call, POOLS[call.name])
        if before is not None:
            with self._pointing(call.at):
                check_place(made, before)
        return made

    def make(self, call: CallSyntax, make: Callable[..., Any]) -> Any:
        """Check a call's arguments against the signature of `make`, and call it with them."""
        parameters = inspect.signature(make).parameters
        wanted = argument_hints(make)
        given: dict[str, Any] = {}
        for place, (name, value, at, value_at) in enumerate(call.arguments):
            if name is None:
                if any(earlier.name for earlier in call.arguments[:place]):
                    raise self.wrong("a value without a name cannot follow a value with a name", at)
                if place >= len(parameters):
                    takes = ", ".join(parameters) or "none"
                    raise self.wrong(f"{call.name} got too many arguments. It takes {takes}", at)
                name = list(parameters)[place]
            elif name not in parameters:
                problem = f"{call.name} has no parameter {quote(name)}"
                raise self.wrong(problem, at, list(parameters))
            if name in given:
                raise self.wrong(f"{call.name} got {name!r} twice", at)
            value = self._resolve(value, wanted[name], value_at)
            with self._pointing(value_at):
                given[name] = convert_argument(call.name, name, value, wanted[name])
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in given:
                raise self.wrong(f"{call.name} needs a value for {name!r}", call.at)
        with self._pointing(call.at):
            return make(**given)

    @contextmanager
    def _pointing(self, at: int) -> Iterator[None]:
        """Make errors that point at no character point at this one."""
        try:
            yield
        except PolicyError:
            raise
        except WeirError as error:
            # The cause is the error of a user's own code, if there is one.
            raise self.wrong(str(error), at) from error.__cause__

    def _resolve(self, value: Any, hint: Any, at: int) -> Any:
        """Make the pool or policy that a parameter requires. Other values are returned
        unchanged.
        """
        again = Parser(self.text, at, saved=self.saved)
        if hint is Pool and isinstance(value, str | ParsedPolicy):
            part = value if isinstance(value, ParsedPolicy) else again._parse()
            if len(part.calls) != 1:
                raise self.wrong("expected one pool, got a pipe of several", at)
            if part.formats[0]:
                raise self.wrong("write the format after the outer pool, not inside it", at)
            return self._pool(part.calls[0], None)
        if isinstance(value, str) and Policy in typing.get_args(hint):
            return again.part()
        return self._make_policy(value) if isinstance(value, ParsedPolicy) else value

    def call(self) -> CallSyntax:
        """Read the call that begins here."""
        name, at = self._word(self.kind)
        if name not in POOLS and name not in NAMED:
            load_plugins()
        if name in POOLS and name in NAMED:  # a pool can be registered after the policy
            with self._pointing(at):
                check_not_a_pool(NAMED[name].make)
        call = CallSyntax(name, at, [])
        if self.take("("):
            start = stop = self.at
            while not self.take(")"):
                if call.arguments and not self.take(","):
                    raise self.wrong("expected ',' or ')'")
                call.arguments.append(self._argument())
                stop = self.at
            call.inside = self.text[start:stop].strip()
        return call

    def _argument(self) -> Argument:
        self._skip()
        at = self.at
        if (word := WORD.match(self.text, at)) is not None:
            self.at = word.end()
            if self.take("="):
                value_at = self.at
                return Argument(word.group(), self.value(), at, value_at)
            self.at = at
        return Argument(None, self.value(), at, at)

    def value(self) -> Any:
        """Read a value: a number, true, false, none, a word, or a `ParsedPolicy`."""
        self._skip()
        at = self.at
        if self.text.startswith(LIST, at):
            return self._parse_inner()
        if (word := WORD.match(self.text, at)) is not None:
            self.at = word.end()
            self._skip()
            if self.text.startswith(("(", "|", ":"), self.at):
                self.at = at
                return self._parse_inner()
            self.at = word.end()
            return CONSTANTS.get(word.group().lower(), word.group())
        if (number := NUMBER.match(self.text, at)) is None:
            raise self.wrong("expected a value")
        self.at = number.end()
        return self.number(number.group(), at)

    def number(self, written: str, at: int) -> float:
        """Return the number that a text states, which matches `NUMBER`. If the text has neither a
        point nor an exponent, it is an int.
        """
        value = float(written)
        if abs(value) > 2**53:
            raise self.wrong("this number is too large. Numbers can be at most 2**53", at)
        return value if re.search(r"[.eE]", written) else int(value)

    def _parse_inner(self) -> ParsedPolicy:
        """Read a policy or a pool inside another one. The parameter determines which of the two it
        is.
        """
        if self.depth == DEEPEST:
            raise self.wrong(f"policies can be nested at most {DEEPEST} deep")
        self.depth += 1
        part = self._parse()
        self.depth -= 1
        return part

    def _word(self, what: str) -> tuple[str, int]:
        self._skip()
        word = self.name.match(self.text, self.at)
        if word is None:
            raise self.wrong(f"expected {what}")
        at, self.at = self.at, word.end()
        return word.group(), at

    def take(self, mark: str) -> bool:
        """Read `mark` if it comes next, and return whether it did."""
        self._skip()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        self._skip()
        return True

    def _skip(self) -> None:
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at

    def wrong(
        self,
        problem: str,
        at: int | None = None,
        names: list[str] | None = None,
        advice: str = "",
    ) -> PolicyError:
        """Make the error about a character. It suggests the closest of some names, and ends with
        some advice.
        """
        at = self.at if at is None else at
        word = self.name.match(self.text, at)
        near = find_nearest(word.group(), names or []) if word else None
        hint = "" if near is None else f"; did you mean {near!r}?"
        if advice:
            hint += f"{'' if hint else '.'} {advice}"
        return PolicyError(problem + hint, self.text, at)


def _is_named(call: CallSyntax) -> bool:
    """Return whether a call on its own is the policy with its name, and not the pool.

    A name that both have means the policy, unless it gets arguments that only the pool takes.
    """
    if call.name not in NAMED or call.name not in POOLS:
        return call.name in NAMED
    return not _pools_own(call)


def _pools_own(call: CallSyntax) -> list[Argument]:
    """Return the arguments of a call that the pool with its name takes, and the policy does not."""
    of_policy = inspect.signature(NAMED[call.name].make).parameters
    of_pool = inspect.signature(POOLS[call.name]).parameters
    return [it for it in call.arguments if it.name in of_pool and it.name not in of_policy]
