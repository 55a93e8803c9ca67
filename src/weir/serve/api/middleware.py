"""Middleware of every request: an id, a check of the Host header, a log line, and a count.

It is plain ASGI, so that applications see disconnects. Log lines are JSON, and never contain text
of conversations.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.serve.api.access import Access
from weir.serve.api.errors import APIError, server_error
from weir.serve.api.operations import Metrics

LOG = logging.getLogger("weir.serve")
UNDER_WAY: set[str] = set()
"""Ids of the requests in progress."""
STALL = 1.0
"""A line is logged after the event loop has been blocked for more than this many seconds."""


def _origin_form(scope: Scope) -> dict[str, Any]:
    """Return `path` and `raw_path` for a request that names the whole address, as clients of
    proxies do (RFC 9112, section 3.2.2). Empty for other requests. The host in the address is
    ignored, because `Access` checks the one in the Host header.
    """
    path, raw = scope["path"], scope.get("raw_path") or b""
    if not path.startswith(("http://", "https://")):
        return {}
    path = "/" + path.split("://", 1)[1].partition("/")[2]
    return {"path": path, "raw_path": b"/" + raw.split(b"://", 1)[-1].partition(b"/")[2]}


class RequestMiddleware:
    """Wraps an application.

    Args:
        access: refuses requests to host names and from pages that are not allowed. Without this
            check, a web page in a browser on this machine could use a server without keys, through
            a DNS name that leads to this machine.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, access: Access) -> None:
        self._app = access.wrap(app)
        self._metrics = metrics
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "://" in scope["path"]:
            scope = {**scope, **_origin_form(scope)}
        number, began = f"req_{secrets.token_hex(12)}", time.perf_counter()
        fields: dict[str, Any] = {"id": number}
        at_end: list[Callable[[], None]] = []
        scope.setdefault("state", {}).update(log_fields=fields, at_end=at_end)
        UNDER_WAY.add(number)
        status = 0
        bare = scope["method"] == "HEAD"
        # Routes do not know HEAD, so they get it as a GET. Their answer is sent without its body.
        asked = {**scope, "method": "GET"} if bare else scope

        def end() -> None:
            while at_end:
                at_end.pop(0)()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            elif not message.get("more_body"):
                end()  # a client that has read the last byte may send another request
            if bare and "body" in message:
                message["body"] = b""
            await send(message)

        try:
            error = self._refuse(scope)
            if error is not None:
                await error.response(scope["path"])(scope, receive, send_with_id)
            else:
                await self._app(asked, receive, send_with_id)
        except Exception:
            LOG.exception("failed", extra={"fields": {"id": number}})
            if not status:
                await server_error().response(scope["path"])(scope, receive, send_with_id)
        finally:
            UNDER_WAY.discard(number)
            end()
            route = getattr(asked.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status or "gone")).inc()
            log_event(
                "request",
                logging.DEBUG if route in ("/health", "/metrics") else logging.INFO,
                **fields,
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                ms=round((time.perf_counter() - began) * 1000, 1),
            )

    def _refuse(self, scope: Scope) -> APIError | None:
        """Return the error for a request that must not reach a route, or None."""
        if (refused := self._access.refuse(scope)) is not None:
            return refused
        return check_http(scope)


def check_http(scope: Scope) -> APIError | None:
    """Return the error for a request that this server cannot read as HTTP/1.0 or HTTP/1.1, or None.

    Such a request is of another version, has an expectation that this server does not know, or has
    a Transfer-Encoding in HTTP/1.0 or together with a Content-Length. With such a
    Transfer-Encoding, a proxy in front of this server could find another end of the body.
    """
    version = scope["http_version"]
    if not version.startswith("1."):
        return APIError(
            505, f"this server speaks HTTP/1.1, not HTTP/{version}. Send the request in HTTP/1.1."
        )
    expected = [value.strip() for name, value in scope["headers"] if name == b"expect"]
    if any(value.lower() != b"100-continue" for value in expected):
        return APIError(
            417,
            "the only expectation that this server meets is 100-continue. Leave out the header "
            "Expect, or send Expect: 100-continue.",
            headers={"Connection": "close"},
        )
    names = {name for name, _ in scope["headers"]}
    # HTTP/1.0 has no Transfer-Encoding.
    if b"transfer-encoding" in names and (
        b"content-length" in names or scope["http_version"] == "1.0"
    ):
        return APIError(
            400,
            "a request can have a Content-Length or, from HTTP/1.1 on, a Transfer-Encoding, but "
            "not both",
            headers={"Connection": "close"},
        )
    return None


async def watch_stalls() -> None:
    """Log when the event loop is blocked, with the requests in progress."""
    clock = asyncio.get_running_loop().time
    while True:
        before = clock()
        await asyncio.sleep(STALL / 4)
        stalled = clock() - before - STALL / 4
        if stalled > STALL:
            log_event("stalled", logging.WARNING, seconds=round(stalled, 1), ids=sorted(UNDER_WAY))


def at_end(scope: Scope, call: Callable[[], None]) -> None:
    """Call a function when a request is over, however it ends, before its last byte is sent."""
    scope["state"]["at_end"].append(call)


def add_log_fields(scope: Scope, **fields: Any) -> None:
    """Add fields to the log line of a request."""
    scope["state"]["log_fields"].update(fields)


class JSONFormatter(logging.Formatter):
    """Formats each record as a line of JSON in printable ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def log_json() -> None:
    """Write the logs of the server and of uvicorn to standard error as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter())
    for name, level in (("weir.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


def log_event(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with fields. No field may contain text of a conversation."""
    LOG.log(level, event, extra={"fields": fields})
