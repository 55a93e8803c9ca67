"""Slots, their positions, and the attention formula that reads them."""

from weir.slab.attention import (
    AttentionParams,
    AttentionResult,
    attention_mass,
    attention_shares,
    attention_softmax,
    attention_weights,
    compute_logits,
    fused_attention,
    split_weights,
    two_weight_attention,
)
from weir.slab.head_split import Answer, HeadSplit
from weir.slab.positions import (
    Alibi,
    LayerPositions,
    Rotary,
    Rotation,
    roll_positions,
    rotation_tables,
    shift_spans,
)
from weir.slab.quantization import FORMATS, Format, as_read, block_size
from weir.slab.selection import AT_ONCE, AttendedSlots, Observe, compute_attention
from weir.slab.slab import (
    LARGE_PAGE,
    SLOT_BUFFERS,
    Slab,
    copy_if_shared,
    cut_slots,
    is_longer,
    merge_groups,
    put_first,
    put_lines,
    slot_lines,
)
from weir.slab.slots import (
    CODED,
    EMPTY,
    QuantizedSlots,
    QuantizedStorage,
    Slots,
    pick,
    quantized_buffers,
)
from weir.slab.spec import STATE, Heads, SlabSpec
from weir.slab.step import DecodeSlots, HeldPart, Step, StepSlots

__all__ = ["Slots"]
