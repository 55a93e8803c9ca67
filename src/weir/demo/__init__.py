"""The demonstration: one book, one small model, several policies side by side."""

from weir.demo.run import POLICIES, run
from weir.demo.report import write_report

__all__ = ["POLICIES", "run", "write_report"]
