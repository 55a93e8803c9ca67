"""Slots, where they stand, and the one formula that reads them."""

from weir.slab.attention import (
    Form,
    Watched,
    attention_mass,
    attention_shares,
    attention_softmax,
    attention_weights,
    fused_attention,
    fuses,
    logits,
    split_attention,
    split_weights,
    two_weight_attention,
    two_weight_kernel,
    watched_attention,
)
from weir.slab.coded import Coded, coded_in
from weir.slab.looped import looped_attention, loops
from weir.slab.positions import Alibi, LayerPositions, Rotary, Turn, packed, rolled, rotation_tables
from weir.slab.quantized import FORMATS, Format
from weir.slab.room import LARGE_PAGE
from weir.slab.slab import Slab, longer, merge_groups, own_copy, put_lines, slot_lines
from weir.slab.slots import EMPTY, Slots, pick
from weir.slab.spec import STATE, Heads, SlabSpec
from weir.slab.stretch import Stretch

__all__ = [
    "EMPTY",
    "FORMATS",
    "LARGE_PAGE",
    "STATE",
    "Alibi",
    "Coded",
    "Form",
    "Format",
    "Heads",
    "LayerPositions",
    "Rotary",
    "Slab",
    "SlabSpec",
    "Slots",
    "Stretch",
    "Turn",
    "Watched",
    "attention_mass",
    "attention_shares",
    "attention_softmax",
    "attention_weights",
    "coded_in",
    "fused_attention",
    "fuses",
    "logits",
    "longer",
    "looped_attention",
    "loops",
    "merge_groups",
    "own_copy",
    "packed",
    "pick",
    "put_lines",
    "rolled",
    "rotation_tables",
    "slot_lines",
    "split_attention",
    "split_weights",
    "two_weight_attention",
    "two_weight_kernel",
    "watched_attention",
]
