"""One layer's stream: append, attend, fold."""

from weir.cache.layer.axes import on_axes
from weir.cache.layer.decode import DecodeSlots
from weir.cache.layer.finite import RowsNotFinite
from weir.cache.layer.layer import Layer
from weir.cache.layer.layout import Layout, laid_out
from weir.cache.layer.plan import Piece, Plan, cut
from weir.cache.layer.spec import LayerSpec

__all__ = [
    "DecodeSlots",
    "Layer",
    "LayerSpec",
    "Layout",
    "Piece",
    "Plan",
    "RowsNotFinite",
    "cut",
    "laid_out",
    "on_axes",
]
