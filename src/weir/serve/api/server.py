"""The server: an application on a socket, until SIGTERM or SIGINT."""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from weir.errors import WeirError
from weir.serve.api.keys import Keys
from weir.serve.limits import Limits

MAX_CONNECTIONS = 1024
"""Connections that may be open at once; further requests get 503."""
GRACE = 5
"""Seconds for telling clients that their answers have been given up."""


def bind(host: str, port: int, keys: Keys) -> socket.socket:
    """Bind a socket to an address, for `run_app`.

    Args:
        port: 0 takes any that is free.
        keys: of clients; without any, only a loopback address is taken.

    Raises:
        WeirError: the address can be reached from elsewhere and there are no keys, or it is in use
            or does not exist.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise WeirError(f"{host} is no address to serve at: {error}") from None
    if not keys and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise WeirError(
            f"{host} can be reached from other machines, and without keys everybody could use it; "
            "name keys with --keys FILE, or serve at 127.0.0.1"
        )
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise WeirError(f"cannot serve at {host}:{port}: {error.strerror}") from None
    return made


class _Server(uvicorn.Server):
    """A uvicorn server that drains the engine when it is told to end."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._draining = threading.Thread(target=drain, name="weir drain", daemon=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no more connections, and start to drain."""
        super().handle_exit(sig, frame)
        if self._draining.ident is None:
            self._draining.start()


def run_app(app: ASGIApp, bound: socket.socket, limits: Limits, drain: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Then no more requests are taken and answers have `limits.drain` seconds to end. The others are
    given up and their clients are told. A second SIGINT ends at once.

    Args:
        bound: from `bind`; closed when it returns.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=round(limits.drain) + GRACE,
        ),
        drain,
    )
    # uvicorn raises these signals again when it has ended well, and they must not kill the process.
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[bound])
    finally:
        bound.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal after the server has ended."""
