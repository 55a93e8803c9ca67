"""A replica: the same server as without a cluster, with a store and leases that others share.

It runs in an actor of Ray Serve, with an engine of its own. Knows nothing about how many there are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray import serve
from starlette.types import ASGIApp

from weir.errors import WeirError
from weir.models import choose_products, load
from weir.serve.api import Keys, log_json, make_app
from weir.serve.client import EngineClient
from weir.serve.cluster.leases import SECONDS
from weir.serve.cluster.router import TABLE
from weir.serve.cluster.storage import open_storage
from weir.serve.cluster.store import SharedStore
from weir.serve.engine import Engine
from weir.serve.limits import Limits
from weir.serve.sessions import RowFormat

PATIENCE = 5.0
"""Seconds that the lease table has to answer."""


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
        """Health check for Ray, which replaces a replica whose engine has failed.

        Raises:
            WeirError: the engine has failed.
        """
        if self._client.failure is not None:
            raise WeirError("the engine has failed, and nothing is answered any more")

    def _beat(self) -> None:
        while not self._over.wait(SECONDS / 4):
            self._store.beat()
