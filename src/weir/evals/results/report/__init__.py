"""Reports of results: one HTML page with its plots inside, and Markdown beside it."""

from weir.evals.results.report.pages import write_report

__all__ = ["write_report"]
