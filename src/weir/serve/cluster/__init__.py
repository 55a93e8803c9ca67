"""Replicas of one server that share their sessions; one replica at a time answers a session."""

from weir.serve.cluster.leases import LeaseTable
from weir.serve.cluster.storage import Storage, open_storage
from weir.serve.cluster.store import SharedStore

__all__ = ["LeaseTable", "SharedStore", "Storage", "open_storage"]
