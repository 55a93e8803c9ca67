"""Figures of speed and memory, each beside that of a peer, timed in turns in one run."""

from weir_bench.figure import FIGURES, QUICK, Row, Setting, Sizes, Skipped
from weir_bench.run import Bench, measure
from weir_bench.tracing import traced

__all__ = ["FIGURES", "QUICK", "Bench", "Row", "Setting", "Sizes", "Skipped", "measure", "traced"]
