"""Routing by session: to the replica that answered it last, else by consistent hashing.

This is Ray Serve's own session affinity (`ConsistentHashRouter`, by the header `x-session-id`) with
the lease table asked first. Ray's multiplexing of models would not do: it takes another header, and
after a second without a match it sends a request anywhere. Routing only saves reading: any replica
answers a request correctly. Runs in Ray Serve's proxies.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

TABLE = "weir-leases"
"""The deployment actor of the lease table."""
PATIENCE = 1.0
"""Seconds that the table has to answer; otherwise hashing decides."""


def find_table() -> Any:
    """The actor of the lease table, from any process of the cluster; None if there is none now."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].endswith(f"::{TABLE}"):
            try:
                return ray.get_actor(named["name"], namespace=named["namespace"])
            except ValueError:
                return None
    return None


class LeaseRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray has no types
    """Ranks the replica that answered the session last first, the others as hashing does."""

    _table: Any = None

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Rank the replicas in the order to try them."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        session = pending_request.metadata.session_id if pending_request is not None else None
        if not session or len(candidate_replicas) < 2:
            return ranks
        name = await self._holder(session)
        last = [[r] for r in candidate_replicas if r.replica_id.unique_id == name]
        return [*last, *(rank for rank in ranks if rank not in last)]

    async def _holder(self, session: str) -> str | None:
        try:
            if self._table is None:
                self._table = find_table()
            if self._table is None:
                return None
            return await asyncio.wait_for(self._table.holder.remote(session), PATIENCE)
        except (TimeoutError, ray.exceptions.RayError):
            self._table = None
            return None
