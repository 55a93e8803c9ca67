"""A function of the client's that a model may call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function.

    Attributes:
        name: letters, digits, `_` and `-`.
        parameters: a JSON schema of an object; None where it takes nothing.
        strict: refuse a schema of which some keyword cannot be enforced.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments of a call."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it, and as clients send it."""
        description = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **description, "parameters": self.schema}
        return {"type": "function", "function": function}


def describe_tools(tools: Iterable[Tool]) -> str:
    """One text with all that is said of tools, to compare or hash."""
    return "\n".join(json.dumps(tool.for_template()) for tool in tools)
