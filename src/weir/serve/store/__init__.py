"""Ends of turns on disk: a folder of snapshots, and tables that say whose they are."""

from weir.serve.store.parcel import Parcel
from weir.serve.store.recorded import DiskStore
from weir.serve.store.shelved import DiskShelf
from weir.serve.store.snapshot import Form
from weir.serve.store.tables import Tables, one, rows

__all__ = ["DiskShelf", "DiskStore", "Form", "Parcel", "Tables", "one", "rows"]
