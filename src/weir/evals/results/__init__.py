"""Results on disk, checked, summed up and reported."""

from weir.evals.results.file import Record, ResultsFile, read_results
from weir.evals.results.plain import plain
from weir.evals.results.summary import Column, Table, by_distance, overviews

__all__ = [
    "Column",
    "Record",
    "ResultsFile",
    "Table",
    "by_distance",
    "overviews",
    "plain",
    "read_results",
]
