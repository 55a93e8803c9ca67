"""Ends of turns on disk: a folder of snapshots, and tables that say whose they are."""

from weir.serve.store.parcel import Parcel
from weir.serve.store.recorded import DiskStore
from weir.serve.store.shelved import DiskShelf
from weir.serve.store.snapshot import Form

__all__ = ["DiskShelf", "DiskStore", "Form", "Parcel"]
