"""Tasks by policies by budgets: which cells there are, and running them."""

from weir.evals.grid.grid import (
    PROTOCOLS,
    Grid,
    count_unrecorded_pools,
    extend_grid,
    make_grid,
    protocol,
)
from weir.evals.grid.runner import Worker, on_ray, one_by_one, run

__all__ = [
    "PROTOCOLS",
    "Grid",
    "Worker",
    "count_unrecorded_pools",
    "extend_grid",
    "make_grid",
    "on_ray",
    "one_by_one",
    "protocol",
    "run",
]
