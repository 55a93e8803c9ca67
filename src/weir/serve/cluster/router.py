"""Requests of a session go to the replica that answered it last; a new one's by consistent hashing.

Runs where requests come in, in Ray Serve's proxies. It only saves reading: wherever a request goes,
it is answered right. Knows nothing about requests but the header `x-session-id`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

TABLE = "weir-leases"
"""The deployment actor that has the leases."""
PATIENCE = 1.0
"""Seconds that the table has to say where a session is; without it, hashing says."""


def table() -> Any:
    """The actor with the leases, wherever one asks from; None where there is none now."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].endswith(f"::{TABLE}"):
            try:
                return ray.get_actor(named["name"], namespace=named["namespace"])
            except ValueError:
                return None
    return None


class LeaseRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray has no types
    """Ranks replicas: who answered the session last, and then as hashing does."""

    _table: Any = None

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Replicas in the order in which they are tried."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        session = pending_request.metadata.session_id if pending_request is not None else None
        if not session or len(candidate_replicas) < 2:
            return ranks
        name = await self._holder(session)
        last = [[it] for it in candidate_replicas if it.replica_id.unique_id == name]
        return [*last, *(rank for rank in ranks if rank not in last)]

    async def _holder(self, session: str) -> str | None:
        try:
            if self._table is None:
                self._table = table()
            if self._table is None:
                return None
            return await asyncio.wait_for(self._table.holder.remote(session), PATIENCE)
        except (TimeoutError, ray.exceptions.RayError):
            self._table = None
            return None
