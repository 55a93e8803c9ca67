"""What stands around every request: its id, the Host it was sent to, a line in the log, a count.

A plain ASGI middleware, so that disconnects come through. Knows nothing about what is asked.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.serve.api.errors import Refused, failed
from weir.serve.api.logs import LOG, told
from weir.serve.api.metrics import Metrics

LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")


class RequestMiddleware:
    """Wraps an application.

    Args:
        app: what it wraps.
        metrics: where requests are counted.
        local: whether only requests to this machine's own names are taken. A server that needs no
            key would otherwise answer to any page in a browser on its machine whose name was made
            to lead there.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, *, local: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number, began = f"req_{secrets.token_hex(12)}", time.perf_counter()
        facts: dict[str, Any] = {"id": number}
        ending: list[Callable[[], None]] = []
        scope.setdefault("state", {}).update(facts=facts, ending=ending)
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        try:
            if self._local and host_of(scope) not in LOCAL:
                refused = Refused(
                    421, "this server has no keys and answers to localhost only", code="wrong_host"
                )
                await refused.response()(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except Exception:
            LOG.exception("failed", extra={"facts": {"id": number}})
            if not status:
                await failed().response()(scope, receive, sending)
        finally:
            for end in ending:
                end()
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status or "gone")).inc()
            told(
                "request",
                logging.DEBUG if route in ("/health", "/metrics") else logging.INFO,
                **facts,
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                ms=round((time.perf_counter() - began) * 1000, 1),
            )


def host_of(scope: Scope) -> str:
    """The name that a request was sent to, without its port."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def at_end(scope: Scope, end: Callable[[], None]) -> None:
    """Call something when a request is over, however it ends."""
    scope["state"]["ending"].append(end)


def note(scope: Scope, **facts: Any) -> None:
    """Facts for the line in the log of a request."""
    scope["state"]["facts"].update(facts)
