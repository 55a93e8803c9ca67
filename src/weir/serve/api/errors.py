"""Errors of requests, in the formats of OpenAI's, Anthropic's and Ollama's APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from weir.errors import shorten
from weir.serve import patterns

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "thread_unsupported_request": "thread_unsupported_request",
}

DEFAULT_CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    415: "unsupported_media_type",
    417: "expectation_failed",
    505: "http_version_not_supported",
}
"""The code of an error that has no code yet, by status."""

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
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "too_long": "has {actual_length} entries, and at most {max_length} are allowed",
    "int_parsing": "must be a whole number",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
}
"""Sentences about values out of bounds, by pydantic's name of the error."""


class ErrorFacts(BaseModel):
    """An error: a message, its type, the wrong field, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Response body of an error."""

    error: ErrorFacts


class AnthropicErrorDetails(BaseModel):
    """The code of an error in Anthropic's API, for programs. It is the same as in OpenAI's API."""

    error_code: str | None


class AnthropicErrorFacts(BaseModel):
    """An error in Anthropic's API: its type, a message, and a code for programs."""

    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorBody(BaseModel):
    """Response body of an error in Anthropic's API."""

    type: str
    error: AnthropicErrorFacts


class OllamaErrorBody(BaseModel):
    """Response body of an error in Ollama's API: a message."""

    error: str


class APIError(Exception):
    """An error that is sent to the client. `param` is the part of the request that is wrong."""

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
        """Make the HTTP response, in the error format of the API that a path belongs to."""
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
"""Anthropic's types of errors, by status.

Other statuses below 500 are `invalid_request_error`, and those from 500 on are `api_error`.
"""


def anthropic_error(error: APIError) -> dict[str, Any]:
    """Return an error in the format of Anthropic's API."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(error.status, other)
    details = {"error_code": error.body["error"]["code"]}
    message = _with_field(error)
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}}


def ollama_error(error: APIError) -> dict[str, Any]:
    """Return an error in the format of Ollama's API."""
    return {"error": _with_field(error)}


def _with_field(error: APIError) -> str:
    """Return an error's message, with the name of the wrong field before it unless the message
    contains the name.

    Anthropic's and Ollama's errors have no separate place for the field. The path within the field
    can differ in these APIs, so the path is left out. Only `weir` is the same in all APIs, and its
    path stays, because "weir:" would look like the name of the program.
    """
    message, param = str(error), error.body["error"]["param"]
    field = re.split(r"[.\[]", param or "", maxsplit=1)[0]
    if field == "weir":
        field = param
    return f"{field}: {message}" if field and field not in message else message


def rate_limited(message: str) -> APIError:
    """An error for too many requests, after which the client should try again."""
    return APIError(
        429,
        message,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"Retry-After": "1"},
    )


def not_found(what: str) -> APIError:
    """An error for something that does not exist or belongs to another owner, which look the
    same.
    """
    return APIError(404, f"{what} not found", code="not_found")


def server_error(
    message: str = "the server failed to answer. The reason is in its log",
) -> APIError:
    """An error that is not the client's fault."""
    return APIError(500, message, code="server_error", kind="server_error")


def storage_full(message: str) -> APIError:
    """An error for a full disk. Clients are told not to try again, because it would not help."""
    no_retry = {"x-should-retry": "false"}
    return APIError(507, message, code="storage_full", kind="server_error", headers=no_retry)


def server_closing() -> APIError:
    """An error for requests while the server shuts down."""
    return APIError(
        503,
        "the server is shutting down. Try again in a moment.",
        code="server_closing",
        kind="server_error",
        headers={"Retry-After": "5"},
    )


def invalid_body(error: ValidationError) -> APIError:
    """The error for the first problem in a body. The value itself is not repeated."""
    return _invalid(error.errors(include_url=False))


def invalid_json(reason: str) -> APIError:
    """The error for a body that cannot be parsed."""
    if any(mark in reason for mark in _SURROGATES):
        where = reason.rpartition(" at ")[2]
        reason = f"a lone surrogate (\\ud800 to \\udfff) is not a character, at {where}"
    if reason.startswith(_TWICE):
        name, _, where = reason.removeprefix(_TWICE).rpartition(" at ")
        message = f"an object in the body has the key {shorten(name)} twice, at {where}. "
        return APIError(400, f"{message}Send it once.", code="invalid_json")
    message = f"the body is not valid JSON: {reason}"
    for limit, sentence in _LIMITS.items():
        if limit in reason:  # valid JSON, but too much for the parser
            message = f"the body {sentence}, at {reason.rpartition(' at ')[2]}"
    return APIError(400, message, code="invalid_json")


def invalid_query(error: RequestValidationError) -> APIError:
    """The error for the first problem in the query of a URL."""
    return _invalid([{**one, "loc": one["loc"][1:]} for one in error.errors()])


def _invalid(found: Sequence[Mapping[str, Any]]) -> APIError:
    # For a union, pydantic reports every member. The deepest error belongs to the member that the
    # client meant. Among equals, an error about a bound is better than one about a type.
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
        message = f"must be {_either(_accepted(found, param))}"
        if first.get("input") in NOT_TEXT:
            message += ". This server reads text only, no images, files or audio"
    if not param and kind == "model_type":
        message = "the body must be a JSON object"
    if kind == "extra_forbidden":
        # `param_of` leaves out a name that is not an identifier, because it can be the name of a
        # type. This one is the client's, for example "max-tokens", and must not be left out.
        own, before = str(first["loc"][-1]), param_of(first["loc"][:-1])
        param = shorten(f"{before}.{own}" if before else own)
        message = f"Unrecognized request argument supplied: {param}"
    elif kind == "missing":
        message = f"Missing required parameter: '{param}'."
    elif param:
        message = f"Invalid '{param}': {message[:1].lower()}{message[1:]}."
    return APIError(400, message, param=param, code=CODES.get(kind))


def _accepted(found: Sequence[Mapping[str, Any]], param: str | None) -> list[str]:
    """List the kinds of values that the members of a union accept at a path, without repetition."""
    accepted: dict[str, None] = {}
    for error in found:
        kind, loc = error["type"], error["loc"]
        if loc and isinstance(loc[-1], str) and loc[-1][:1].isupper():
            loc = loc[:-1]  # the class of the union's member
        if param_of(loc) == param and (kind in TYPES or kind == "literal_error"):
            accepted[TYPES[kind] if kind in TYPES else error["ctx"]["expected"]] = None
    return list(accepted)


def _either(kinds: Sequence[str]) -> str:
    """Join alternatives with "or". An alternative may itself contain "or"."""
    return (", or " if any(" or " in one for one in kinds) else " or ").join(kinds)


def _message(error: Mapping[str, Any]) -> str:
    """Return a sentence about a wrong value."""
    kind = error["type"]
    facts = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in (error.get("ctx") or {}).items()
    }
    if kind in TYPES:
        return f"must be {TYPES[kind]}"
    if kind == "literal_error":
        return f"must be {facts['expected']}"
    if kind == "string_pattern_mismatch":
        return patterns.SENTENCES.get(
            str(facts["pattern"]), "has characters that are not allowed here"
        )
    if kind == "too_long" and facts["actual_length"] is None:
        # pydantic does not count the entries of an object.
        facts["actual_length"] = len(error["input"])
    if kind == "too_short":
        least, has = facts["min_length"], facts["actual_length"]
        entries = "1 entry" if least == 1 else f"{least} entries"
        return f"must have at least {entries}, and has {has or 'none'}"
    if kind == "string_too_short" and facts["min_length"] == 1:
        return "must not be empty"
    return SENTENCES[kind].format(**facts) if kind in SENTENCES else str(error["msg"])


NOT_TEXT = (
    *("image", "image_url", "input_image"),
    *("document", "file", "input_file"),
    *("audio", "input_audio", "video", "video_url"),
)
"""Types of parts of a message that only models with other senses could read."""
_LIMITS = {
    "recursion limit exceeded": "is nested too deeply",
    "number out of range": "has a number with too many digits",
}
"""Sentences about the JSON parser's limits, by a part of the parser's message."""
_TWICE = "Detected duplicate key "
"""The beginning of the JSON parser's message about an object with two values for a key."""
_SURROGATES = ("unexpected end of hex escape", "surrogate in hex escape")
"""Parts of the JSON parser's messages about lone surrogates."""


def param_of(loc: tuple[int | str, ...]) -> str | None:
    """Return the path of a field, such as `messages[0].role`. Names of types are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{shorten(part)}" if path else shorten(part)
    return shorten(path) if len(path) > _MAX_PATH else path or None


_MAX_PATH = 200
"""Characters of a path; a longer one is shortened."""
