"""Ends of turns on disk: a folder of snapshots, and tables that say whose they are."""

from weir.serve.store.parcel import Parcel
from weir.serve.store.recorded import DiskStore
from weir.serve.store.shelved import DiskShelf
from weir.serve.store.snapshot import Form, Later, read, written
from weir.serve.store.tables import Tables, one, rows
from weir.serve.store.writer import Job, Writer

__all__ = [
    "DiskShelf",
    "DiskStore",
    "Form",
    "Job",
    "Later",
    "Parcel",
    "Tables",
    "Writer",
    "one",
    "read",
    "rows",
    "written",
]
