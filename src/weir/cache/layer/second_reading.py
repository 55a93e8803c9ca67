"""A second reading of the newest tokens of a row, which says how much each is needed.

After a fold the model reads the last chunk once more, with the slots as they stand, as if it were
asked to repeat it. Nobody keeps the repeated tokens. What stays is a number beside each token of
the chunk: the largest share of its attention that one of the repeated queries gave it.
"""

from __future__ import annotations

from torch import Tensor

from weir.cache.layer.attention import mask_of_piece, rotate_to_positions
from weir.cache.layer.layer_state import LayerState
from weir.cache.layer.plan import Segment
from weir.slab import AttentionParams, attention_softmax, compute_logits, select_attention


def read_again(
    state: LayerState,
    row: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    params: AttentionParams,
    segment: Segment,
) -> Tensor:
    """Answer the queries of repeated tokens of one row, and note what the originals were given.

    Args:
        state: the layer's slots; `Slab.mass` of the row's last tokens is set, if the pipe asks.
        row: the row; its tail is empty.
        queries: [1, kv_heads, group, width, key_dim], of the last `width` tokens read once more.
        keys, values: theirs [1, kv_heads, width, dim].
        params: how the layer attends.
        segment: the repeated tokens, behind all others.

    Returns:
        [1, kv_heads, group, width, value_dim].
    """
    assert state.slab is not None
    used, width, spec = state.used[row], segment.width, state.spec
    slab = state.slab.view(row, row + 1).copy()
    slab.grow(used + width)
    slab.open_tail(used, segment.start, width)
    queries, keys = rotate_to_positions(spec, slab, queries, keys, segment)
    slab.append(keys, values, used)
    if slab.span is not None:
        slab.span.narrow(2, used, width).copy_(segment.spans[:, None])
    stop, start = used + width, state.first
    bias = mask_of_piece(spec.positions, slab, segment, stop, queries.dtype, in_step=True)
    if spec.pipe.needs_second_reading:
        mine = slab.run(start, stop)
        some = bias if bias is None or bias.shape[4] == 1 else bias[..., start:]
        shares = attention_softmax(compute_logits(queries, mine.keys, params, some), mine.b, params)
        most = shares.amax(dim=(2, 3)).nan_to_num_(0.0)[:, :, : used - start]
        mass = state.slab.mass
        assert mass is not None
        position = state.slab.position[row, :, start:used]
        again = position >= segment.start - width
        mass[row, :, start:used] = most[0].where(again, mass[row, :, start:used])
    slots = slab.attended(start, stop)
    attend = select_attention(queries, slots, params, bias)
    return attend(queries, slots, params, bias).answers
