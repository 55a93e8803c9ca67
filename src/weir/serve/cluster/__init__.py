"""Replicas of one server that share their sessions."""

from weir.serve.cluster.shared_turns import SharedTurns
from weir.serve.cluster.storage import Storage, open_storage

__all__ = ["SharedTurns", "Storage", "open_storage"]
