"""Replicas of one server that share their sessions."""

from weir.serve.cluster.storage import Storage, open_storage
from weir.serve.cluster.store import SharedStore

__all__ = ["SharedStore", "Storage", "open_storage"]
