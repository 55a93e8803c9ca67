"""Figures of speed and memory, each beside that of a peer, timed in turns in one run."""

from weir.bench.figure import FIGURES, QUICK, Row, Setting, Sizes, Skipped
from weir.bench.run import Bench, measure
from weir.bench.tracing import traced

__all__ = ["FIGURES", "QUICK", "Bench", "Row", "Setting", "Sizes", "Skipped", "measure", "traced"]
