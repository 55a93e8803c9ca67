"""Budgets that are measured: which slots of which layer are worth their bytes, on a text."""

from weir.evals.calibration.calibration import (
    Calibration,
    LayerBudget,
    calibrate,
    check_path,
)

__all__ = ["Calibration", "LayerBudget", "calibrate", "check_path"]
