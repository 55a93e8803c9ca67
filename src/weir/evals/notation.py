"""Parses lists of tasks and policies, and inserts budgets into policies.

Tasks are calls like pools, with commas between them: `ppl(tokens=20000, text=book.txt), recall`.
A value is a number, a word or a text; a text with a comma, a parenthesis, a space, an equals sign
or a quotation mark needs quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from weir.errors import PolicyError, WeirError
from weir.policies import NUMBER, Parser, parse_call, parse_policy
from weir.pools import CONSTANTS, WORD

Parsed = TypeVar("Parsed")
QUANTIZED = "quantized"
"""A policy that takes another policy as an argument. Its budget is that of the inner policy."""
_FILE = re.compile(r"[^,|()\[\]]+\.toml\s*(?=,|$)", re.IGNORECASE)
"""The name of a policy file in a list of policies."""
_BARE = re.compile(r"""[^\s,()'"=]+""")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")


class _TaskParser(Parser):
    """Parser of tasks: calls whose names may have a hyphen and whose values may be texts."""

    name = re.compile(rf"{WORD.pattern}(-\w+)*")
    kind = "a task"

    def value(self) -> Any:
        """Parse a number, true, false, none, or else a text."""
        if (quoted := _QUOTED.match(self.text, self.at)) is not None:
            self.at = quoted.end()
            return quoted.group(1) if quoted.group(2) is None else quoted.group(2)
        if (bare := _BARE.match(self.text, self.at)) is None:
            raise self.wrong("expected a value")
        at, self.at = self.at, bare.end()
        if NUMBER.fullmatch(bare.group()):
            return self.number(bare.group(), at)
        return CONSTANTS.get(bare.group().lower(), bare.group())


def read_tasks(text: str, known: Mapping[str, Any]) -> list[Any]:
    """Parse a list of tasks. `known` maps each name to the class of the task.

    A WeirError points at the wrong character, and suggests the nearest name.
    """
    parser = _TaskParser(text)

    def one() -> Any:
        call = parser.call()
        if call.name not in known:
            raise parser.wrong(f"no task is called {call.name!r}", call.at, sorted(known))
        return parser.make(call, known[call.name])

    try:
        return _listed(parser, one, "','")
    except PolicyError as error:
        raise WeirError(str(error)) from None


def _listed(parser: Parser, one: Callable[[], Parsed], expected: str) -> list[Parsed]:
    """Parse a whole text as items that are separated by commas."""
    found = [one()]
    while parser.take(","):
        found.append(one())
    if parser.at < len(parser.text):
        raise parser.wrong(f"expected {expected} or the end")
    return found


def read_policies(text: str) -> list[str]:
    """Parse a list of policies; policies keep their spelling, policy files are read."""
    parser = Parser(text)

    def one() -> str:
        if (path := _FILE.match(text, parser.at)) is None:
            return str(parser.part())
        parser.at = path.end()
        return str(parse_policy(path.group().strip()))

    return _listed(parser, one, "'|', ','")


def takes_budget(policy: str) -> bool:
    """Whether a policy is a named policy that takes a budget and was written without one.

    A quantized policy takes the budget of the policy inside.
    """
    call = parse_call(policy)
    if call is not None and call.name == QUANTIZED:
        return "policy" in call.given and takes_budget(str(call.given["policy"]))
    return call is not None and call.takes_budget


def with_budget(policy: str, budget: int) -> str:
    """Insert a budget into a policy; WeirError if it takes none or has one already, PolicyError if
    it does not accept this budget.
    """
    call = parse_call(policy)
    if call is not None and call.name == QUANTIZED and takes_budget(policy):
        rest = {name: value for name, value in call.given.items() if name != "policy"}
        inner, how = with_budget(str(call.given["policy"]), budget), replace(call, given=rest)
        return str(parse_policy(f"{QUANTIZED}({', '.join(filter(None, (inner, how.plain)))})"))
    if call is None or not call.takes_budget:
        raise WeirError(
            f"{policy} cannot get a budget here. Use a named policy that takes a budget and is "
            "written without one, such as streaming_llm."
        )
    return str(parse_policy(call.with_arguments(budget=budget)))
