"""The demonstration: one book, one small model, several policies side by side."""

from weir.evals.demo.report import write_report
from weir.evals.demo.run import NAMES, POLICIES, TITLE, Story, book, read_book, with_story

__all__ = [
    "NAMES",
    "POLICIES",
    "TITLE",
    "Story",
    "book",
    "read_book",
    "with_story",
    "write_report",
]
