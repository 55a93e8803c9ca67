"""Results on disk, checked, summed up and reported."""

from weir.evals.results.file import CellRecord, ResultsFile, failures, for_json, read_results
from weir.evals.results.naming import distinguish_pools, name_loading, shorten_layered
from weir.evals.results.summary import Column, FigureTable, by_distance, overviews

__all__ = [
    "CellRecord",
    "Column",
    "FigureTable",
    "ResultsFile",
    "by_distance",
    "distinguish_pools",
    "failures",
    "for_json",
    "name_loading",
    "overviews",
    "read_results",
    "shorten_layered",
]
