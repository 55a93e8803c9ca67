"""Tasks by policies by budgets: which cells there are, and running them."""

from weir.evals.grid.grid import (
    PROTOCOLS,
    Grid,
    extend_grid,
    make_grid,
    protocol,
)
from weir.evals.grid.runner import Worker, on_ray, run

__all__ = [
    "PROTOCOLS",
    "Grid",
    "Worker",
    "extend_grid",
    "make_grid",
    "on_ray",
    "protocol",
    "run",
]
