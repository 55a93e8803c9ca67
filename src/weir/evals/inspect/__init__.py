"""A look into a model, beside the figures of the papers: attention, keys, norms, what is kept."""

from weir.evals.inspect.attention import Attention, watch
from weir.evals.inspect.page import Page
from weir.evals.inspect.run import SECTIONS, check_places, chosen, look, sizes
from weir.evals.inspect.section import Asked, Picture, Section, Table, drawing

__all__ = [
    "SECTIONS",
    "Asked",
    "Attention",
    "Page",
    "Picture",
    "Section",
    "Table",
    "check_places",
    "chosen",
    "drawing",
    "look",
    "sizes",
    "watch",
]
