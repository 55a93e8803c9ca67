"""Files of questions in their official formats, and what reading them needs."""

from weir.evals.data.coco import Captioned, read_captions
from weir.evals.data.extras import needed
from weir.evals.data.records import Record, read_records

__all__ = [
    "Captioned",
    "Record",
    "needed",
    "read_captions",
    "read_records",
]
