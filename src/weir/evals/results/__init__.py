"""Results on disk, checked, summed up and reported."""

from weir.evals.results.file import CellRecord, ResultsFile, failures, read_results
from weir.evals.results.json_values import for_json
from weir.evals.results.lists import named_shortly
from weir.evals.results.pools import told_apart
from weir.evals.results.summary import Column, Table, by_distance, overviews
from weir.evals.results.ways import as_loaded

__all__ = [
    "CellRecord",
    "Column",
    "ResultsFile",
    "Table",
    "as_loaded",
    "by_distance",
    "failures",
    "for_json",
    "named_shortly",
    "overviews",
    "read_results",
    "told_apart",
]
