"""Results on disk, checked, summed up and reported."""

from weir.evals.results.file import CellRecord, ResultsFile, failures, for_json, read_results
from weir.evals.results.naming import name_records
from weir.evals.results.summary import Column, FigureTable, by_distance, overviews

__all__ = [
    "CellRecord",
    "Column",
    "FigureTable",
    "ResultsFile",
    "by_distance",
    "failures",
    "for_json",
    "name_records",
    "overviews",
    "read_results",
]
