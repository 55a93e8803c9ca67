"""What weir must know of a model, and how it gets inside."""

from weir.models.endings import Endings
from weir.models.facts import (
    DROPPING,
    LayerFacts,
    ModelFacts,
    describe,
    input_device,
    transformers_model,
)
from weir.models.hooks import attach, compile_steps, detach
from weir.models.loading import ASSETS, is_local, load, skeleton
from weir.models.vocabulary import check_ids, out_of_range

__all__ = [
    "ASSETS",
    "DROPPING",
    "Endings",
    "LayerFacts",
    "ModelFacts",
    "attach",
    "check_ids",
    "compile_steps",
    "describe",
    "detach",
    "input_device",
    "is_local",
    "load",
    "out_of_range",
    "skeleton",
    "transformers_model",
]
