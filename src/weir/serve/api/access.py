"""Rules for who may use a server: by host name (`--allow-host`), by web page (`--allow-origin`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from weir.errors import WeirError, quote, shorten
from weir.serve.api.errors import APIError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9\[\]._:-]+|null")
EXPOSED = ("x-session-id", "x-request-id", "x-weir-warning", "x-weir-forgotten", "retry-after")
"""Headers that web pages may read."""


@dataclass(frozen=True)
class Access:
    """Rules for who may use a server, in addition to its keys.

    Args:
        hosts: other names of this machine. A server without keys answers requests to these and to
            `LOCAL_HOSTS` only.
        origins: web pages that may use the server from a browser (CORS); "*" for all.
        has_keys: whether requests need a key. If so, any name of this machine is accepted.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    has_keys: bool = False

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not HOST.fullmatch(host):
                raise WeirError(
                    "--allow-host must be a host name without a port, such as "
                    f"host.docker.internal, got {quote(host)}. Name each host separately."
                )
        for origin in self.origins:
            if origin == "*" and not self.has_keys:
                raise WeirError(
                    "--allow-origin '*' needs --keys FILE: without keys, every web page that is "
                    "open on this machine could use the server. Name each origin, or add --keys "
                    "FILE."
                )
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise WeirError(
                    "--allow-origin must be the origin of a web page, such as "
                    f"http://localhost:3000, got {quote(origin)}. Give the scheme, the host and "
                    "any port, without a path."
                )

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Add CORS headers for the allowed web pages to an application."""
        if not self.origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self.origins,
            allow_methods=("GET", "HEAD", "POST", "PUT", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
            allow_private_network=True,
        )

    def refuse(self, scope: Scope) -> APIError | None:
        """Return the error for a request to a host name that is not allowed, or for a browser's
        question whether a web page that is not allowed may send a request (CORS preflight). None
        for all other requests.
        """
        host = host_of(scope)
        allowed = {*LOCAL_HOSTS, *(name.lower() for name in self.hosts)}
        if not self.has_keys and host not in allowed:
            shown = shorten(host)
            return APIError(
                421,
                f"the request was sent to the host {shown!r}, and a server without keys answers "
                "only requests to localhost and to hosts named with --allow-host. "
                "Start weir serve with --allow-host "
                f"{shown or 'NAME'}, or with --keys FILE.",
                code="wrong_host",
            )
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        is_preflight = scope["method"] == "OPTIONS" and (
            b"access-control-request-method" in headers
        )
        if is_preflight and "*" not in self.origins and origin not in self.origins:
            return APIError(
                403,
                f"web pages of {shorten(origin)!r} may not use this server. Start weir serve with "
                f"--allow-origin {shorten(origin) or 'ORIGIN'}.",
                code="wrong_origin",
            )
        return None


def host_of(scope: Scope) -> str:
    """Return the host that a request was sent to, without its port."""
    headers: Any = scope["headers"]
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
