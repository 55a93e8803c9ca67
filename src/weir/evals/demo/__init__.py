"""The demonstration: one book, one small model, several policies side by side."""

from weir.evals.demo.report import write_report
from weir.evals.demo.run import POLICIES, TITLE, book, read_book

__all__ = ["POLICIES", "TITLE", "book", "read_book", "write_report"]
