"""Files of questions in their official formats, and what reading them needs."""

from weir.evals.data.extras import needed
from weir.evals.data.records import Record, read_records

__all__ = [
    "Record",
    "needed",
    "read_records",
]
