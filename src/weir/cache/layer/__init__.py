"""One layer's stream: append, attend, fold."""

from weir.cache.layer.decode import Spot
from weir.cache.layer.layer import Layer
from weir.cache.layer.plan import Plan, cut

__all__ = [
    "Layer",
    "Plan",
    "Spot",
    "cut",
]
