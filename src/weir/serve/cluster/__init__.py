"""One server on many machines: replicas that share their sessions, and none ends another's turn."""

from weir.serve.cluster.leases import Leases, LeaseTable
from weir.serve.cluster.ledger import Ledger, Page
from weir.serve.cluster.shared import Shared, shared_at
from weir.serve.cluster.store import SharedStore

__all__ = ["LeaseTable", "Leases", "Ledger", "Page", "Shared", "SharedStore", "shared_at"]
