"""Results on disk: writes, checks, summarizes and reports them."""

from weir.evals.results.file import CellRecord, ResultsFile, failures, for_json, read_results
from weir.evals.results.naming import name_records
from weir.evals.results.summary import Column, FigureTable, by_distance, overviews

__all__ = ["read_results"]
