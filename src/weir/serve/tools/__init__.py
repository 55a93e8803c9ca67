"""Calls of a client's functions: how models write them, and how they are constrained and parsed."""

from weir.serve.tools.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    CallFormat,
    Tool,
    describe_tools,
    format_of,
)
from weir.serve.tools.parser import (
    AnswerPart,
    CallEnd,
    CallParser,
    CallStart,
    TextDelta,
    join_parts,
)

__all__ = [
    "HERMES",
    "LLAMA",
    "MISTRAL",
    "MISTRAL_ARGS",
    "AnswerPart",
    "CallEnd",
    "CallFormat",
    "CallParser",
    "CallStart",
    "TextDelta",
    "Tool",
    "describe_tools",
    "format_of",
    "join_parts",
]
