"""The demonstration: one book, one small model, several policies side by side."""

from weir.demo.report import write_report
from weir.demo.run import POLICIES, TITLE, book, run

__all__ = ["POLICIES", "TITLE", "book", "run", "write_report"]
