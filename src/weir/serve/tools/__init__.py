"""Calls of a client's functions: how models write them, what they may write, and reading them."""

from weir.serve.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, CallFormat, form_of
from weir.serve.tools.parser import (
    CallEnd,
    CallParser,
    CallStart,
    Part,
    Said,
    message_of,
    read_calls,
)
from weir.serve.tools.tool import Tool, written

__all__ = [
    "HERMES",
    "LLAMA",
    "MISTRAL",
    "MISTRAL_ARGS",
    "CallEnd",
    "CallFormat",
    "CallParser",
    "CallStart",
    "Part",
    "Said",
    "Tool",
    "form_of",
    "message_of",
    "read_calls",
    "written",
]
