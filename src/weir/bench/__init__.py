"""Figures of speed and memory, each beside that of a peer, timed in turns in one run.

`figure` says what a figure is, `run` makes those that are asked for, `report` writes them down; the
other files measure. A figure is a ratio of things that took turns, so what else the machine does
meets both.
"""

from weir.bench.figure import FIGURES, QUICK, Row, Setting, Sizes, Skipped
from weir.bench.run import Bench, measure

__all__ = ["FIGURES", "QUICK", "Bench", "Row", "Setting", "Sizes", "Skipped", "measure"]
