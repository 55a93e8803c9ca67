"""Replicas on Ray Serve: each is the same server as without a cluster, with a shared store.

Joins a cluster, deploys replicas, and waits for the end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import DeploymentActorConfig, HTTPOptions, RequestRouterConfig
from starlette.types import ASGIApp

from weir.errors import WeirError
from weir.models import choose_products, load
from weir.serve.api import Keys, log_json, make_app
from weir.serve.client import EngineClient
from weir.serve.cluster.leases import SECONDS, LeaseTable
from weir.serve.cluster.router import TABLE
from weir.serve.cluster.storage import open_storage
from weir.serve.cluster.store import SharedStore
from weir.serve.engine import Engine
from weir.serve.limits import Limits
from weir.serve.sessions import RowFormat

LOCAL = "local"
ROUTERS = {
    "leases": "weir.serve.cluster.router.LeaseRouter",
    "hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}
"""Routers by their names on the command line."""
PATIENCE = 5.0
"""Seconds in which a cluster, or the lease table, must answer."""


@dataclass(frozen=True)
class Settings:
    """What every replica serves.

    Attributes:
        place: address of the shared storage (`open_storage`).
        most: number of turns that a replica keeps in memory.
        keys: SHA-256 hashes of the API keys.
    """

    model: str
    policy: str
    chunk: int
    rows: int
    place: str
    name: str
    most: int = 256
    keys: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    deterministic: bool = False
    threads: int | None = None
    loading: dict[str, Any] = field(default_factory=dict)


class RayLeases:
    """Client of the lease table's actor; if that does not answer, the ledger alone decides."""

    def __init__(self) -> None:
        self._actor: Any = None

    def begin(self, session: str, replica: str) -> float:
        """Lease a session for a turn; return 0, or seconds until the next try."""
        try:
            found: float = ray.get(self._table().begin.remote(session, replica), timeout=PATIENCE)
        except (ray.exceptions.RayError, ValueError):
            self._actor = None
            return 0.0
        return found

    def end(self, session: str, replica: str) -> None:
        """End a turn, without waiting for the table."""
        self._tell("end", session, replica)

    def beat(self, replica: str, sessions: Iterable[str]) -> None:
        """Record a replica's heartbeat and its turns under way."""
        self._tell("beat", replica, list(sessions))

    def _tell(self, what: str, *given: Any) -> None:
        try:
            getattr(self._table(), what).remote(*given)
        except (ray.exceptions.RayError, ValueError):
            self._actor = None

    def _table(self) -> Any:
        if self._actor is None:
            self._actor = serve.get_deployment_actor(TABLE)
        return self._actor


@serve.ingress()
class Replica:
    """One engine behind OpenAI's HTTP API."""

    def __init__(self, settings: Settings) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        log_json()
        model, tokenizer = load(settings.model, **settings.loading)
        choose_products(model)
        form = RowFormat.of(model, settings.policy, settings.chunk)
        self._store = SharedStore(
            open_storage(settings.place),
            RayLeases(),
            serve.get_replica_context().replica_id.unique_id,
            form,
            most=settings.most,
        )
        engine = Engine(
            model,
            settings.policy,
            settings.rows,
            self._store,
            chunk=settings.chunk,
            queue=settings.limits.queue,
            deterministic=settings.deterministic,
        )
        self._client = EngineClient(
            engine,
            tokenizer,
            settings.name,
            settings.limits,
            acquire_lease=self._store.acquire_lease,
        )
        self._keys = Keys(settings.keys)
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="weir-beat", daemon=True).start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application to Ray."""
        return make_app(self._client, self._keys)

    def check_health(self) -> None:
        """Health check for Ray, which replaces a replica whose engine has failed."""
        if self._client.failure is not None:
            raise WeirError("the engine has failed, and nothing is answered any more")

    def _beat(self) -> None:
        while not self._over.wait(SECONDS / 4):
            self._store.beat()


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join a cluster for a `with` block; on exit, finish answers under way and remove all replicas.

    SIGTERM works like SIGINT inside the block.

    Args:
        address: `local` for a cluster of this machine alone that ends with this process, or
            `host:port` of a cluster's head.

    Raises:
        WeirError: no cluster answers there, or it lets anybody in.
    """
    _connect(address)
    # Ray has installed its own handler, which aborts the process.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def _connect(address: str) -> None:
    # One line of ours replaces Ray's long logs; workers keep the usual priority.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_worker_niceness", "0")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, include_dashboard=False, **quiet)
        else:
            _check(address)
            ray.init(address=address, **quiet)
    except WeirError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeirError(f"the cluster {address} cannot be used: {reason}") from None


def _check(address: str) -> None:
    """Refuse an address without a cluster, and one that runs anybody's code (CVE-2023-48022)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WeirError(f"--cluster takes 'local' or 'host:port', not {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as there:
            name = str(there.getpeername()[0])
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WeirError(f"no cluster answers at {address}: {reason}") from None
    if not ipaddress.ip_address(name).is_loopback and os.environ.get("RAY_AUTH_MODE") != "token":
        raise WeirError(
            f"{address} is another machine, and whoever reaches a Ray cluster without tokens can "
            "run anything there; start it with RAY_AUTH_MODE=token, and set that here too"
        )


def deploy(settings: Settings, replicas: int, host: str, port: int, routing: str) -> None:
    """Deploy replicas at an address, and wait until all of them answer."""
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= replicas else 0
    limits = settings.limits
    deployment = serve.deployment(
        Replica,
        name="weir",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        max_ongoing_requests=limits.open,
        graceful_shutdown_timeout_s=limits.drain,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(request_router_class=ROUTERS[routing]),
        deployment_actors=[
            DeploymentActorConfig(
                name=TABLE, actor_class=ray.remote(LeaseTable), actor_options={"num_cpus": 0}
            )
        ],
    )
    where = "HeadOnly" if len(ray.nodes()) == 1 else "EveryNode"
    try:
        serve.start(proxy_location=where, http_options=HTTPOptions(host=host, port=port))
        serve.run(deployment.bind(settings), name="weir", route_prefix="/")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeirError(f"the replicas do not come up: {reason}") from None


def until_ended() -> None:
    """Wait for SIGTERM or SIGINT."""
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
