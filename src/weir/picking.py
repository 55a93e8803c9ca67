"""Rows of a tensor by their numbers, head by head: what pools and halvings do most of."""

from __future__ import annotations

import torch
from torch import Tensor


def pick(t: Tensor, index: Tensor) -> Tensor:
    """The slots of `t` that `index` names.

    Args:
        t: [batch, heads, slots, dim], a view of a slab, say.
        index: [batch, heads, n], int64, from 0 on.

    Returns:
        [batch, heads, n, dim].
    """
    batch, heads, _, dim = t.shape
    steps = t.stride()
    if not t.numel() or steps[3] != 1 or any(step % dim for step in steps[:3]):
        return t.gather(2, index[..., None].expand(-1, -1, -1, dim))
    # The memory under `t` as one long list of rows: to copy whole rows is several times as fast as
    # to gather numbers.
    row, head, slot = (step // dim for step in steps[:3])
    last = sum((n - 1) * step for n, step in zip(t.shape[:3], (row, head, slot), strict=True))
    rows = t.as_strided((last + 1, dim), (dim, 1))
    starts = torch.arange(batch, device=t.device)[:, None] * row
    starts = starts + torch.arange(heads, device=t.device) * head
    return rows.index_select(0, (starts[..., None] + index * slot).flatten()).view(
        batch, heads, -1, dim
    )
