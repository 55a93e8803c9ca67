"""A look into a model, beside the figures of the papers: attention, keys, norms, what is kept."""

from weir.evals.inspect.attention import Attention, watch
from weir.evals.inspect.page import (
    SECTIONS,
    InspectionPage,
    check_places,
    look,
    select_sections,
    sizes,
)
from weir.evals.inspect.section import Inspection, Picture, Section, drawing
from weir.evals.report import TextTable

__all__ = [
    "SECTIONS",
    "Attention",
    "Inspection",
    "InspectionPage",
    "Picture",
    "Section",
    "TextTable",
    "check_places",
    "drawing",
    "look",
    "select_sections",
    "sizes",
    "watch",
]
