"""Inspect a model beside the papers' figures: attention, keys, norms and kept tokens."""

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
