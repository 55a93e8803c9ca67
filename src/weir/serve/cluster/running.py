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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from starlette.types import ASGIApp

from weir.errors import WeirError
from weir.loading import load
from weir.native import choose_products
from weir.serve.api import Keys, log_event, log_json, make_app
from weir.serve.client import EngineClient
from weir.serve.cluster.shared_turns import SharedTurns
from weir.serve.cluster.storage import open_storage
from weir.serve.engine.engine import Engine
from weir.serve.limits import Limits
from weir.serve.sessions.snapshot import RowFormat
from weir.serve.sessions.store import SessionStore

LOCAL = "local"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Ray's session affinity: requests with one `x-session-id` go to one replica while it is there."""
PATIENCE = 5.0
"""Seconds in which a cluster must answer."""


@dataclass(frozen=True)
class Settings:
    """The settings of every replica: `place` is for `open_storage`, `keys` are SHA-256 hashes."""

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
    aliases: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    notes_changes: bool = False


@serve.ingress()
class Replica:
    """One engine behind OpenAI's HTTP API."""

    def __init__(self, settings: Settings) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        log_json()
        model, tokenizer = load(settings.model, **settings.loading)
        choose_products(model)
        row_format = RowFormat.of(model, settings.policy, settings.chunk)
        storage = open_storage(settings.place)
        store = SessionStore(SharedTurns(storage, row_format, most=settings.most))
        engine = Engine(
            model,
            settings.policy,
            settings.rows,
            store,
            chunk=settings.chunk,
            queue=settings.limits.queue,
            shared=len(settings.keys) > 1,
            deterministic=settings.deterministic,
        )
        engine.warm_up()
        steps = engine.cache.steps
        log_event("decode steps", run=steps["run"], reason=steps["reason"])
        self._client = EngineClient(
            engine,
            tokenizer,
            settings.name,
            settings.limits,
            is_replica=True,
            aliases=settings.aliases,
            notes_changes=settings.notes_changes,
        )
        self._access = settings.hosts, settings.origins
        self._keys = Keys(settings.keys)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application to Ray."""
        return make_app(self._client, self._keys, *self._access)

    def check_health(self) -> None:
        """Health check for Ray, which replaces a replica whose engine has failed."""
        if self._client.failure is not None:
            raise WeirError("the engine has failed, and nothing is answered any more")


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join a cluster for a `with` block; on exit, finish answers under way and remove all replicas.

    SIGTERM works like SIGINT inside the block. The address `local` is a cluster of this machine
    alone that ends with this process; others are `host:port` of a cluster's head.
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


def deploy(settings: Settings, replicas: int, host: str, port: int) -> None:
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
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
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
