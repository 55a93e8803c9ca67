"""Calls of a client's functions: how models write them, what they may write, and reading them."""

from weir.serve.calls.forms import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, CallForm, form_of
from weir.serve.calls.reading import (
    CallEnd,
    CallReader,
    CallStart,
    Part,
    Said,
    message_of,
    read_calls,
)
from weir.serve.calls.tool import Tool, written

__all__ = [
    "HERMES",
    "LLAMA",
    "MISTRAL",
    "MISTRAL_ARGS",
    "CallEnd",
    "CallForm",
    "CallReader",
    "CallStart",
    "Part",
    "Said",
    "Tool",
    "form_of",
    "message_of",
    "read_calls",
    "written",
]
