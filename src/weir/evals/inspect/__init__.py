"""Draws the papers' figures for any model: attention, keys, norms and kept tokens."""

from weir.evals.inspect.attention import Attention, watch
from weir.evals.inspect.page import (
    InspectionPage,
    check_places,
    look,
    select_sections,
    sizes,
)
from weir.evals.inspect.section import Inspection, Picture, Section

__all__ = ["Inspection", "InspectionPage", "Picture", "Section", "look"]
