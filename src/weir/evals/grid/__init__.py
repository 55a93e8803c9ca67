"""The grid of an evaluation (tasks by policies by budgets) and its runner."""

from weir.evals.grid.grid import (
    PROTOCOLS,
    Grid,
    extend_grid,
    make_grid,
    protocol,
)
from weir.evals.grid.runner import Worker, on_ray, run

__all__ = ["make_grid", "run"]
