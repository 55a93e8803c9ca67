"""What weir must know of a model, and how it gets inside."""

from weir.models.endings import Endings
from weir.models.facts import DROPPING, LayerFacts, ModelFacts, describe
from weir.models.hooks import attach, compile_steps, detach
from weir.models.loading import ASSETS, is_local, load
from weir.models.vocabulary import check_ids

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
    "is_local",
    "load",
]
