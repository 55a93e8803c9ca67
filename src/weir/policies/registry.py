"""Every policy that has a name, and how one was called. Knows nothing about what policies are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weir.errors import format_value


@dataclass(frozen=True)
class NamedPolicy:
    """A policy with a name.

    Attributes:
        make: from its parameters to a policy.
        paper: where it comes from.
        pipe: what it makes by default, as text; None if that is not said, or no pipe.
    """

    make: Callable[..., Any]
    paper: str
    pipe: str | None = None


NAMED: dict[str, NamedPolicy] = {}
"""Every named policy."""


@dataclass(frozen=True)
class PolicyCall:
    """A named policy as it was called: `streaming_llm(64, sinks=8)`.

    Attributes:
        name: the policy's.
        given: the values it was given, by parameter.
        arguments: the same as they were written, what stands between the brackets.
    """

    name: str
    given: Mapping[str, Any]
    arguments: str

    @classmethod
    def by_name(cls, name: str, given: Mapping[str, Any]) -> PolicyCall:
        """With arguments written the plain way, each with its parameter's name."""
        arguments = ", ".join(f"{key}={format_value(value)}" for key, value in given.items())
        return cls(name, dict(given), arguments)

    @property
    def parameters(self) -> tuple[str, ...]:
        """What the policy may be given."""
        return tuple(inspect.signature(NAMED[self.name].make).parameters)

    @property
    def takes_budget(self) -> bool:
        """Whether it has a budget and was given none, nor a rate, which is a size too."""
        return "budget" in self.parameters and not {"budget", "rate"} & self.given.keys()

    @property
    def takes_slots(self) -> bool:
        """Whether it has a word for how its slots are held, `slots`, and was given none."""
        usual = inspect.signature(NAMED[self.name].make).parameters.get("slots")
        return usual is not None and isinstance(usual.default, str) and "slots" not in self.given

    def with_arguments(self, **more: Any) -> str:
        """The text of the same policy with more arguments, behind those it was written with."""
        both = filter(None, (self.arguments, PolicyCall.by_name(self.name, more).arguments))
        return f"{self.name}({', '.join(both)})"

    @property
    def plain(self) -> str:
        """What stands between the brackets, with the parameters' names."""
        return PolicyCall.by_name(self.name, self.given).arguments

    def __str__(self) -> str:
        """The plain way, with the parameters' names: `streaming_llm(budget=64, sinks=8)`."""
        plain = self.plain
        return f"{self.name}({plain})" if plain else self.name
