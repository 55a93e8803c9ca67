"""Errors as OpenAI's clients read them. Knows nothing about what went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from weir.errors import shorten

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
}

KINDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""By what pydantic calls it: what a value of the wrong type should have been."""
WORDS = {
    "less_than": "it is to be less than {lt}",
    "less_than_equal": "it is to be {le} or less",
    "greater_than": "it is to be more than {gt}",
    "greater_than_equal": "it is to be {ge} or more",
    "too_long": "it has {actual_length} entries, and may have {max_length}",
    "int_parsing": "it is to be a whole number",
    "too_short": "it has {actual_length} entries, and needs {min_length}",
    "string_too_long": "it may have {max_length} characters",
    "string_too_short": "it is to have {min_length} characters or more",
    "string_pattern_mismatch": "it is to fit the pattern {pattern}",
}
"""The same for values that are out of bounds."""


class ErrorFacts(BaseModel):
    """What is wrong: in words, of which kind, in which part of the request, and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error as OpenAI's clients read it."""

    error: ErrorFacts


class Refused(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: what is wrong, and what to do.
        param: which part of the request.
        code: for programs.
        kind: OpenAI's type of the error.
        headers: to be sent with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_object(message, kind, param, code)
        self.headers = headers

    def response(self) -> JSONResponse:
        """What is sent."""
        return JSONResponse(self.body, self.status, self.headers)


def error_object(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as JSON."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def overloaded(message: str) -> Refused:
    """Too much at once: the client is to come again."""
    return Refused(
        429,
        message,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"Retry-After": "1"},
    )


def not_found(what: str) -> Refused:
    """There is no such thing, or it is somebody else's: nobody can tell which."""
    return Refused(404, f"there is no such {what}", code="not_found")


def conflict(message: str, code: str, *, param: str | None = None) -> Refused:
    """It cannot be done as things stand."""
    return Refused(409, message, param=param, code=code)


def locked(message: str, seconds: float) -> Refused:
    """A session is answered elsewhere: the client is to come again."""
    return Refused(
        409,
        message,
        code="conversation_locked",
        headers={"Retry-After": str(max(1, math.ceil(seconds)))},
    )


def failed(message: str = "the server failed to answer; its log says why") -> Refused:
    """Not the client's fault."""
    return Refused(500, message, code="server_error", kind="server_error")


def invalid(error: ValidationError) -> Refused:
    """The first thing that is wrong with a body; what it says instead is not repeated."""
    return _wrong(error.errors(include_url=False))


def invalid_query(error: RequestValidationError) -> Refused:
    """The first thing that is wrong with what stands behind `?` in an address."""
    return _wrong([{**each, "loc": each["loc"][1:]} for each in error.errors()])


def _wrong(found: Sequence[Mapping[str, Any]]) -> Refused:
    # Of a value that might have been several things, what lies deepest is what was meant; and of
    # those that lie as deep, one that is the right thing and too much of it.
    first = found[0]
    for other in found[1:]:
        here, there = param_of(first["loc"]) or "", param_of(other["loc"]) or ""
        if there.startswith(f"{here}[") or (
            there == here and first["type"] in KINDS and other["type"] not in KINDS
        ):
            first = other
    kind, message = first["type"], _worded(first)
    param = param_of(first["loc"])
    if kind == "json_invalid":
        return Refused(400, f"the body is no JSON that can be read: {message}", code="invalid_json")
    if not param and kind == "model_type":
        message = "the body is to be an object of JSON"
    if kind == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
    elif kind == "missing":
        message = f"Missing required parameter: '{param}'."
    elif param:
        message = f"Invalid '{param}': {message[:1].lower()}{message[1:]}."
    return Refused(400, message, param=param, code=CODES.get(kind, "invalid_value"))


def _worded(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, for who sent it."""
    kind = error["type"]
    facts = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in (error.get("ctx") or {}).items()
    }
    if kind in KINDS:
        return f"it is to be {KINDS[kind]}"
    if kind == "literal_error":
        return f"it is to be {facts['expected']}"
    if kind == "too_long" and facts["actual_length"] is None:
        facts["actual_length"] = len(error["input"])  # pydantic does not count what is in an object
    if kind == "json_invalid" and any(mark in error["msg"] for mark in _SURROGATES):
        where = error["msg"].rpartition(" at ")[2]
        return f"a lone surrogate (\\ud800 to \\udfff) is no character, at {where}"
    return WORDS[kind].format(**facts) if kind in WORDS else str(error["msg"])


_SURROGATES = ("unexpected end of hex escape", "surrogate in hex escape")
"""What pydantic says of them."""


def param_of(loc: tuple[int | str, ...]) -> str | None:
    """`messages[0].role` for where pydantic found something; names of types are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{shorten(part)}" if path else shorten(part)
    return shorten(path) if len(path) > _LONGEST else path or None


_LONGEST = 200
"""Characters of a path that an error repeats whole."""
