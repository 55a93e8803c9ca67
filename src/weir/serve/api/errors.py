"""Errors in OpenAI's format. Knows nothing about what went wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from weir.errors import shorten

CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}

DEFAULT_CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    415: "unsupported_media_type",
}
"""Codes of errors that have none of their own, by status."""

TYPES = {
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
"""Expected types, by pydantic's name of the error."""
SENTENCES = {
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
"""Sentences for values out of bounds, by pydantic's name of the error."""


class ErrorFacts(BaseModel):
    """An error: a message, its type, the field that is wrong, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Response body of an error."""

    error: ErrorFacts


class AnthropicErrorFacts(BaseModel):
    """An error in Anthropic's API: its type and a message."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Response body of an error in Anthropic's API."""

    type: str
    error: AnthropicErrorFacts


class OllamaErrorBody(BaseModel):
    """Response body of an error in Ollama's API: a message."""

    error: str


class APIError(Exception):
    """An error that is sent to the client; `param` is the part of the request that is wrong."""

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
        code = code or DEFAULT_CODES.get(status)
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = headers

    def response(self, path: str = "") -> JSONResponse:
        """Make the HTTP response, in the form of the API that a path belongs to."""
        body: dict[str, Any] = self.body
        if path.startswith("/v1/messages"):
            body = anthropic_error(self)
        elif path.startswith("/api/"):
            body = ollama_error(self)
        return JSONResponse(body, self.status, self.headers)


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors, by status. Others are `invalid_request_error` below 500, and
`api_error` from there on.
"""


def anthropic_error(error: APIError) -> dict[str, Any]:
    """An error in the form of Anthropic's API."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": _with_field(error)}}


def ollama_error(error: APIError) -> dict[str, Any]:
    """An error in the form of Ollama's API."""
    return {"error": _with_field(error)}


def _with_field(error: APIError) -> str:
    """The message, after the field that it is about if it does not name it: the other APIs have no
    separate place for the field. Its path within the field may be another there, and is left out.
    """
    message, param = str(error), error.body["error"]["param"]
    field = re.split(r"[.\[]", param or "", maxsplit=1)[0]
    return f"{field}: {message}" if field and field not in message else message


def rate_limited(message: str) -> APIError:
    """Too much at once: the client should try again."""
    return APIError(
        429,
        message,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"Retry-After": "1"},
    )


def not_found(what: str) -> APIError:
    """There is no such thing, or it belongs to another owner: the client cannot tell which."""
    return APIError(404, f"there is no such {what}", code="not_found")


def server_error(message: str = "the server failed to answer; its log says why") -> APIError:
    """Not the client's fault."""
    return APIError(500, message, code="server_error", kind="server_error")


def storage_full(message: str) -> APIError:
    """Nothing can be kept: asking again does not help, so clients are told not to."""
    no_retry = {"x-should-retry": "false"}
    return APIError(507, message, code="storage_full", kind="server_error", headers=no_retry)


def server_closing() -> APIError:
    """The server is shutting down."""
    return APIError(
        503,
        "the server is ending; ask again in a moment",
        code="server_closing",
        kind="server_error",
        headers={"Retry-After": "5"},
    )


def invalid_body(error: ValidationError) -> APIError:
    """The first thing that is wrong with a body; the value itself is not repeated."""
    return _invalid(error.errors(include_url=False))


def invalid_json(reason: str) -> APIError:
    """The body cannot be parsed."""
    if any(mark in reason for mark in _SURROGATES):
        where = reason.rpartition(" at ")[2]
        reason = f"a lone surrogate (\\ud800 to \\udfff) is no character, at {where}"
    message = f"the body is no JSON that can be read: {reason}"
    return APIError(400, message, code="invalid_json")


def invalid_query(error: RequestValidationError) -> APIError:
    """The first thing that is wrong with the query of a URL."""
    return _invalid([{**one, "loc": one["loc"][1:]} for one in error.errors()])


def _invalid(found: Sequence[Mapping[str, Any]]) -> APIError:
    # Of a union, pydantic reports every member. The deepest error belongs to the member that was
    # meant; among equals, one about a bound is better than one about the type.
    first = found[0]
    for other in found[1:]:
        here, there = param_of(first["loc"]) or "", param_of(other["loc"]) or ""
        if there.startswith(f"{here}[") or (
            there == here and first["type"] in TYPES and other["type"] not in TYPES
        ):
            first = other
    kind, message = first["type"], _message(first)
    param = param_of(first["loc"])
    if kind in TYPES or kind == "literal_error":
        message = f"it is to be {_either(_accepted(found, param))}"
    if not param and kind == "model_type":
        message = "the body is to be an object of JSON"
    if kind == "extra_forbidden":
        # Its name is the client's own, and may look like that of a type: "max-tokens".
        own, before = str(first["loc"][-1]), param_of(first["loc"][:-1])
        param = shorten(f"{before}.{own}" if before else own)
        message = f"Unrecognized request argument supplied: {param}"
    elif kind == "missing":
        message = f"Missing required parameter: '{param}'."
    elif param:
        message = f"Invalid '{param}': {message[:1].lower()}{message[1:]}."
    return APIError(400, message, param=param, code=CODES.get(kind))


def _accepted(found: Sequence[Mapping[str, Any]], param: str | None) -> list[str]:
    """List the kinds of values that the members of a union accept at a path, each once."""
    accepted: dict[str, None] = {}
    for error in found:
        kind, loc = error["type"], error["loc"]
        if loc and isinstance(loc[-1], str) and loc[-1][:1].isupper():
            loc = loc[:-1]  # the class that a member of the union is
        if param_of(loc) == param and (kind in TYPES or kind == "literal_error"):
            accepted[TYPES[kind] if kind in TYPES else error["ctx"]["expected"]] = None
    return list(accepted)


def _either(kinds: Sequence[str]) -> str:
    """A list of alternatives, some of which may be such lists themselves."""
    return (", or " if any(" or " in one for one in kinds) else " or ").join(kinds)


def _message(error: Mapping[str, Any]) -> str:
    """A sentence about a wrong value."""
    kind = error["type"]
    facts = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in (error.get("ctx") or {}).items()
    }
    if kind in TYPES:
        return f"it is to be {TYPES[kind]}"
    if kind == "literal_error":
        return f"it is to be {facts['expected']}"
    if kind == "too_long" and facts["actual_length"] is None:
        facts["actual_length"] = len(error["input"])  # pydantic does not count what is in an object
    return SENTENCES[kind].format(**facts) if kind in SENTENCES else str(error["msg"])


_SURROGATES = ("unexpected end of hex escape", "surrogate in hex escape")
"""Parts of the parser's messages about lone surrogates."""


def param_of(loc: tuple[int | str, ...]) -> str | None:
    """The path of a field, such as `messages[0].role`; names of types are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{shorten(part)}" if path else shorten(part)
    return shorten(path) if len(path) > _MAX_PATH else path or None


_MAX_PATH = 200
"""Characters of a path; a longer one is shortened."""
