"""Slots, where they stand, and the one formula that reads them."""

from weir.slab.attention import (
    Form,
    attention_mass,
    fused_attention,
    fuses,
    split_attention,
    split_weights,
    two_weight_attention,
    two_weight_kernel,
)
from weir.slab.positions import Alibi, Place, Rotary, rolled
from weir.slab.slab import Slab, lined, longer
from weir.slab.slots import EMPTY, Slots, pick

__all__ = [
    "EMPTY",
    "Alibi",
    "Form",
    "Place",
    "Rotary",
    "Slab",
    "Slots",
    "attention_mass",
    "fused_attention",
    "fuses",
    "lined",
    "longer",
    "pick",
    "rolled",
    "split_attention",
    "split_weights",
    "two_weight_attention",
    "two_weight_kernel",
]
