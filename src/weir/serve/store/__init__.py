"""Ends of turns on disk: a folder of snapshots, and tables that say whose they are."""

from weir.serve.store.recorded import DiskStore
from weir.serve.store.shelved import DiskShelf

__all__ = ["DiskShelf", "DiskStore"]
