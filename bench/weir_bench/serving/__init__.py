"""Figures of a server under load, as its clients see it."""

from weir_bench.serving.load import Heard, Manner, percentiles
from weir_bench.serving.part import PARTS, QUICK, Plan
from weir_bench.serving.run import Served, measure

__all__ = ["PARTS", "QUICK", "Heard", "Manner", "Plan", "Served", "measure", "percentiles"]
