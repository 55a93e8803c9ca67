"""Replicas of one server that share their sessions."""

from weir.serve.cluster.shared_turns import SharedTurns
from weir.serve.cluster.storage import Storage, open_storage
