"""A function of a client's that a model may call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function.

    Attributes:
        name: letters, digits, `_` and `-`.
        description: what it does, in words.
        parameters: a JSON schema of an object; None where it takes nothing.
        strict: refuse a schema that cannot be held to.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """What a call's arguments are."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters

    def told(self) -> dict[str, Any]:
        """As chat templates take it, and clients send it."""
        about = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **about, "parameters": self.schema}
        return {"type": "function", "function": function}


def written(tools: Sequence[Tool]) -> str:
    """All that is said of tools, as one text."""
    return "\n".join(json.dumps(tool.told()) for tool in tools)
