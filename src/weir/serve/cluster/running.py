"""Replicas on Ray: each is the same server as without a cluster, with a shared store.

Ray places their processes, and starts lost ones again. The front forwards requests to them. This
file joins a cluster, starts replicas, and serves until the end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray

from weir.errors import WeirError, first_line
from weir.serve.api import log_json, run_app
from weir.serve.api.front import Front
from weir.serve.cluster.replica import ReplicaProcess, Settings
from weir.serve.limits import Limits

LOCAL = "local"
PATIENCE = 5.0
"""Seconds in which a cluster must answer."""
STARTING = 600.0
"""Seconds in which a replica must have restarted."""
LATER = 10.0
"""Seconds that a process may take to end after its last answer."""


class Replica:
    """A Ray actor that runs a replica's process on its machine."""

    def __init__(self, settings: Settings, number: int) -> None:
        if not ipaddress.ip_address(settings.host).is_loopback:
            settings = replace(settings, host=ray.util.get_node_ip_address())
        self._process = ReplicaProcess(settings, number)

    def locate(self, *, failed: bool) -> tuple[str, int]:
        """Return the address of the process once it serves (`ReplicaProcess.locate`)."""
        return self._process.locate(failed=failed)

    def drain(self) -> None:
        """Let the process finish its answers."""
        self._process.drain()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process, and kill it if it takes longer than `seconds`."""
        self._process.wait(seconds)


class Replicas:
    """The replicas of a cluster.

    Args:
        settings: the settings of each replica. `secret` and `host` are replaced.
        number: number of replicas.
    """

    def __init__(self, settings: Settings, number: int) -> None:
        one_machine = len(ray.nodes()) == 1
        self._drain = settings.limits.drain
        self.secret = secrets.token_hex(32)
        self.has_keys = bool(settings.keys)
        settings = replace(
            settings, secret=self.secret, host="127.0.0.1" if one_machine else "0.0.0.0"
        )
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= number else 0
        actor = ray.remote(Replica).options(
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=-1,
            max_concurrency=4,  # so that `drain` does not wait for `locate`
            scheduling_strategy="SPREAD",
        )
        self.actors: list[Any] = [actor.remote(settings, at) for at in range(number)]
        try:
            ray.get([actor.locate.remote(failed=False) for actor in self.actors])
        except Exception as error:
            raise WeirError(f"the replicas do not start: {_reason(error)}") from None

    def locate(self, number: int, *, failed: bool) -> tuple[str, int]:
        """Return the address of a replica. A lost replica is started again first
        (`front.Locate`).
        """
        try:
            found: tuple[str, int] = ray.get(
                self.actors[number].locate.remote(failed=failed), timeout=STARTING
            )
        except Exception as error:
            raise WeirError(_reason(error)) from None
        return found

    def serve(self, bound: socket.socket, limits: Limits) -> None:
        """Serve at a bound socket until SIGTERM or SIGINT. Answers get `limits.drain` seconds to
        finish.
        """
        log_json()
        front = Front(len(self.actors), self.locate, self.secret, has_keys=self.has_keys)

        def drain() -> None:
            front.end()
            self._end()

        run_app(front, bound, limits, drain)

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # lost actors have ended already
            ray.get([actor.drain.remote() for actor in self.actors])
            ray.get([actor.wait.remote(self._drain + LATER) for actor in self.actors])


def _reason(error: Exception) -> str:
    """Return the last line of an error. Ray puts an actor's traceback before it."""
    said = [line for line in str(error).strip().splitlines() if line.strip()]
    return (said or [type(error).__name__])[-1].removeprefix("weir.errors.WeirError: ")


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join a cluster for a `with` block. On exit, remove all replicas.

    SIGTERM works like SIGINT inside the block. The address `local` means a cluster on this machine
    only, which ends with this process. Other addresses are `host:port` of a cluster's head node.
    """
    _connect(address)
    # Ray has installed its own handler, which aborts the process.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        ray.shutdown()  # this ends all actors, and they end their processes
        signal.signal(signal.SIGTERM, before)


def _connect(address: str) -> None:
    # weir prints one line in place of Ray's long logs. Workers keep the usual priority.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_worker_niceness", "0")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, include_dashboard=False, **quiet)
        else:
            _check(address)
            ray.init(address=address, **quiet)
    except WeirError:
        raise
    except Exception as error:
        raise WeirError(f"cannot use the cluster {address}: {first_line(error)}") from None


def _check(address: str) -> None:
    """Refuse an address without a cluster, and a cluster that runs anyone's code
    (CVE-2023-48022).
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WeirError(
            f"--cluster must be local or host:port, got {address!r}. Use, for example, --cluster "
            "local."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as there:
            name = str(there.getpeername()[0])
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WeirError(
            f"no Ray cluster answers at {address}: {reason}. Start one with ray start --head, or "
            "use --cluster local."
        ) from None
    if not ipaddress.ip_address(name).is_loopback and os.environ.get("RAY_AUTH_MODE") != "token":
        raise WeirError(
            f"{address} is on another machine, and anyone who reaches a Ray cluster without "
            "tokens can run code there. Start the cluster with RAY_AUTH_MODE=token, and set "
            "RAY_AUTH_MODE=token for this command too."
        )
