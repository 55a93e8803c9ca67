"""Tasks by policies by budgets: which cells there are, and running them."""

from weir.evals.grid.grid import Grid, make_grid
from weir.evals.grid.growing import grown, untold
from weir.evals.grid.protocols import PROTOCOLS, protocol
from weir.evals.grid.runner import Worker, one_by_one, run

__all__ = [
    "PROTOCOLS",
    "Grid",
    "Worker",
    "grown",
    "make_grid",
    "one_by_one",
    "protocol",
    "run",
    "untold",
]
